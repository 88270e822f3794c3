"""``recfx.verify``: is the converted model the original one? Outputs, gradients and one optimizer step, on copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recfx.discovery.bypass import way_around
from recfx.discovery.discover import check_module
from recfx.errors import ConversionError, RecfxError
from recfx.modules.collection import unsharded_collections
from recfx.modules.converted_collection import weight_name
from recfx.modules.copy_modules import copy_with_tensors
from recfx.modules.whole_graph import WholeGraph
from recfx.nodes.training_checks import on_a_copy
from recfx.optim.in_backward import run_in_backward
from recfx.record.verify_report import DIFFERENT, EQUAL, NOT_REPRODUCIBLE, REFUSED_SAMPLE, SKIPPED, Check, VerifyReport
from recfx.record.wrappers import unwrap
from recfx.sharding.collection import sharded_collections
from recfx.tracing.randomness import fixed_randomness
from recfx.tracing.sample import Sample
from recfx.verification.parity import compare_tensors, largest_difference
from recfx.verification.reference_model import attach_optimizers, copy_fused_state, oracle_of
from recfx.verification.run_step import LEARNING_RATE, Run, run_step

# Tables below float32 are pooled in another precision by the standard collection (design, section 8).
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2}


def verify(
    original: nn.Module, converted: nn.Module, sample: Any, *, rtol: float = 1e-5, atol: float = 1e-6
) -> VerifyReport:
    """Compare a converted model with the original: outputs, gradients and one step, train and eval, two batch sizes.

    Works on copies: random states, index, norms and gradients of both models stay. The step is SGD where no optimizer
    runs in the backward. The oracle of a hashed table is the standard collection fed the ids mapped through
    ``items()``.

    Args:
        original: with standard collections.
        converted: what ``convert`` made of it.
        sample: one call, as for ``convert``.
        rtol: relative tolerance; at least 1e-2 with float16 tables and 2e-2 with bfloat16 ones.
        atol: absolute tolerance, likewise.

    Raises:
        ConversionError: ``invalid_argument``; ``sharded_model``: what one rank holds is no whole model.
    """
    check_module(original, "original")
    check_module(converted, "converted")
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
        return _verify(original, converted, Sample.of(sample), rtol, atol)


def _verify(original: nn.Module, converted: nn.Module, call: Sample, rtol: float, atol: float) -> VerifyReport:
    _refuse_sharded(original, converted)
    original, converted = unwrap(original), unwrap(converted)
    if call.on_meta() or any(parameter.is_meta for parameter in converted.parameters()):
        message = "there is nothing to compute with on the meta device"
        return VerifyReport((Check("", "", "run", "meta", SKIPPED, message=message),), rtol=rtol, atol=atol)
    floor = max([_TOLERANCE.get(parameter.dtype, 0.0) for parameter in converted.parameters()], default=0.0)
    comparison = _Comparison(original, converted, max(rtol, floor), max(atol, floor))
    comparison.check_indexes()
    for batch, sized in (("sample", call), ("sample + 1", call.resized())):
        for mode in ("train", "eval"):
            if sized is None:
                comparison.skip(mode, batch, "sample", "the sample's batch size cannot be told")
            else:
                comparison.compare(mode, batch, sized)
    return VerifyReport(tuple(comparison.checks), comparison.tables, comparison.rtol, comparison.atol)


class _Comparison:
    def __init__(self, original: nn.Module, converted: nn.Module, rtol: float, atol: float) -> None:
        self.original, self.converted, self.rtol, self.atol = original, converted, rtol, atol
        self.checks: list[Check] = []
        self.tables: dict[str, dict[str, dict[str, float]]] = {}
        self.collections = unsharded_collections(converted)
        self.originals = {
            path: module for path, module in original.named_modules() if isinstance(module, EmbeddingBagCollection)
        }
        self.fused = {
            weight_name(path, table)
            for path, collection in self.collections.items()
            for table in collection.fused_optimizers()
        }
        # Only here may rows differ that the batch did not use: the dense rule moves them, the fused one does not.
        self.masked = {
            weight_name(path, table)
            for path, collection in self.collections.items()
            for table, optimizer in collection.fused_optimizers().items()
            if optimizer.differs_from_dense_rule
        }

    def check_indexes(self) -> None:
        """Every index must find what it lists: the oracle below knows only the listing."""
        for path, collection in self.collections.items():
            for table in collection.hash_indexes:
                ids, rows = collection.index(table).items()
                wrong = int((collection.index(table).find(ids) != rows).sum())
                if wrong:
                    message = f"{wrong} of {ids.numel()} ids are found in another row than items() lists"
                    where = f"{path + '.' if path else ''}{table}"
                    self.checks.append(Check("", "", "index", where, DIFFERENT, float("inf"), message))

    def skip(self, mode: str, batch: str, where: str, message: str) -> None:
        """Note that nothing was compared."""
        self.checks.append(Check(mode, batch, "run", where, SKIPPED, message=message))

    def compare(self, mode: str, batch: str, call: Sample) -> None:
        """Run the oracle and the converted model, each on copies, and compare."""
        training = mode == "train"
        try:
            subject = copy_with_tensors(self.converted).train(training)
            attach_optimizers(self.converted, subject, skip=self.fused)
            self._attach_missing(subject)
        except Exception as error:  # whatever the user's modules raise when they are copied
            self.skip(mode, batch, "copy", f"the model cannot be copied ({type(error).__name__}: {error})")
            return
        if training and self._has_index() and self._admits_between_calls():
            self.skip(mode, batch, "hash_ids", "one forward calls a collection several times, and ids may be admitted "
                      "between the calls: the standard collection has no such thing")  # fmt: skip
            return
        hashed, failure = self._hash_sample(call) if training and self._has_index() else (subject, None)
        try:
            wanted = self._run_oracle(hashed, call, training)
        except Exception as error:  # the model's own failure: there is nothing to compare with
            message = f"the original raises {type(error).__name__}: {error}"
            self.skip(mode, batch, "original", message + self._advice(subject, call, training))
            return
        again = copy_with_tensors(hashed) if self._has_index() and not training else hashed
        try:
            if failure is not None:
                raise failure
            found = run_step(subject, call, training, self.originals)
        except RecfxError as error:  # a table that is full, say: the message says what to do
            self.checks.append(Check(mode, batch, "run", REFUSED_SAMPLE, DIFFERENT, float("inf"), str(error)))
            return
        except Exception as error:
            message = f"raises {type(error).__name__}: {error}"
            self.checks.append(Check(mode, batch, "run", "converted", DIFFERENT, float("inf"), message))
            return
        self._compare_runs(mode, batch, wanted, found, lambda: self._run_oracle(again, call, training))
        self._note_tables(wanted, found)

    def _hash_sample(self, call: Sample) -> tuple[nn.Module, Exception | None]:
        """A copy of the converted model as it is once the sample's ids are hashed, and what went wrong with that.

        Nothing else of a training step has happened to it: the oracle needs the rows that the step will use.
        """
        hashed = copy_with_tensors(self.converted).train()
        hashed_call = call.clone()
        try:
            with fixed_randomness(), torch.no_grad(), on_a_copy():
                hashed(*hashed_call.args, **hashed_call.kwargs)
        except Exception as error:  # compared with what the original does, by the caller
            return self.converted, error
        return hashed, None

    def _admits_between_calls(self) -> bool:
        return any(
            table.admits and collection.calls > 1
            for collection in self.collections.values()
            for table in collection.tables
        )

    def _attach_missing(self, model: nn.Module) -> None:
        """A table that evicts cannot train without an optimizer in backward: where there is none yet, SGD stands in."""
        for path, collection in self.collections.items():
            for table in collection.tables:
                name = weight_name(path, table.name)
                weight = model.get_parameter(name)
                if table.evicts and name not in self.fused and weight.requires_grad and not _has_optimizer(weight):
                    run_in_backward(torch.optim.SGD, weight, {"lr": LEARNING_RATE})

    def _advice(self, subject: nn.Module, call: Sample, training: bool) -> str:
        """What the converted model says where the original fails: it knows what to do about a wrong batch."""
        try:
            run_step(subject, call, training)
        except RecfxError as error:
            return f" The converted model: {error}"
        except Exception as error:
            return f" The converted model raises {type(error).__name__}."
        return ""

    def _has_index(self) -> bool:
        return any(len(collection.hash_indexes) for collection in self.collections.values())

    def _run_oracle(self, subject: nn.Module, call: Sample, training: bool) -> Run:
        """One step of the original; with an index, over copies of the tables of ``subject``, which stays as it is."""
        oracle = oracle_of(self.original, subject)
        attach_optimizers(self.original, oracle, skip=set())
        self._attach_missing(oracle)
        if self._has_index():
            copy_fused_state(subject, oracle)
        return run_step(oracle, call, training, self.originals)

    def _compare_runs(self, mode: str, batch: str, wanted: Run, found: Run, repeat: Callable[[], Run]) -> None:
        """Compare; only if something differs, run the oracle again to see whether it agrees with itself."""
        if wanted.originals or found.originals:  # nothing else ran then
            calls = [check for check in self._call_checks(mode, batch, wanted, found) if check.status != EQUAL]
            self.checks += calls
            if not calls:
                called = min(wanted.originals | found.originals)
                message = f"a copy of the model still calls {called!r} of the model itself"
                self.skip(mode, batch, "copy", message)
            return
        checks = self._checks(mode, batch, wanted, found)
        if any(check.status == DIFFERENT for check in checks):
            unsteady = {
                (check.what, check.where)
                for check in self._checks(mode, batch, wanted, repeat())
                if check.status == DIFFERENT
            }
            checks = [
                replace(check, status=NOT_REPRODUCIBLE, message="the original differs from itself under one seed")
                if check.status == DIFFERENT and (check.what, check.where) in unsteady
                else check
                for check in checks
            ]
        self.checks += checks

    def _call_checks(self, mode: str, batch: str, wanted: Run, found: Run) -> list[Check]:
        """Every collection must be called as often as in the original; the converted model may call no other."""
        if isinstance(self.converted, WholeGraph):  # leaves calls out of which nothing is used
            return []
        checks = []
        for path in [path for path in self.collections if path in wanted.calls]:
            expected, actual = wanted.calls[path], found.calls[path]
            if expected == actual and path not in found.originals:
                checks.append(Check(mode, batch, "calls", path, EQUAL))
                continue
            if path in found.originals:
                message = "the converted model calls the original collection"
            else:
                message = f"{actual} calls of the converted collection, but the original's is called {expected} times"
            way = self._way_around()
            message += f"; it reaches the original's modules by {way}" if way else ""
            checks.append(Check(mode, batch, "calls", path, DIFFERENT, float(abs(actual - expected)), message))
        return checks

    def _way_around(self) -> str:
        """By what the converted model reaches the original collections, or modules that hold them."""
        holders = [
            module
            for module in self.original.modules()
            if any(isinstance(inside, EmbeddingBagCollection) for inside in module.modules())
        ]
        return way_around(self.converted, holders)

    def _checks(self, mode: str, batch: str, wanted: Run, found: Run) -> list[Check]:
        checks = self._call_checks(mode, batch, wanted, found)
        for what in ("outputs", "gradients", "parameters", "buffers"):
            expected, actual = getattr(wanted, what), getattr(found, what)
            for where in sorted(set(expected) | set(actual)):
                first, second = _same_rows(expected.get(where), actual.get(where)), actual.get(where)
                if what == "parameters" and where in self.masked:
                    first, second = (_touched(value, wanted.touched.get(where)) for value in (first, second))
                checks.append(self._check(mode, batch, what, where, first, second))
        return checks

    def _check(
        self, mode: str, batch: str, what: str, where: str, wanted: torch.Tensor | None, found: torch.Tensor | None
    ) -> Check:
        if wanted is None or found is None:
            present = found if wanted is None else wanted
            if present is None or (what == "gradients" and not bool(present.any())):
                return Check(mode, batch, what, where, EQUAL)  # no gradient is a zero gradient
            message = f"only the {'converted' if wanted is None else 'original'} model has it"
            return Check(mode, batch, what, where, DIFFERENT, float("inf"), message)
        if torch.equal(wanted, found) and wanted.dtype == found.dtype:
            return Check(mode, batch, what, where, EQUAL)
        largest = largest_difference(wanted, found)
        difference = compare_tensors(where, wanted, found, self.rtol, self.atol)
        if difference is None:
            return Check(mode, batch, what, where, EQUAL, largest)
        return Check(mode, batch, what, where, DIFFERENT, largest, difference.message)

    def _note_tables(self, wanted: Run, found: Run) -> None:
        for path, collection in self.collections.items():
            tables = self.tables.setdefault(path, {})
            for table in collection.tables:
                name = weight_name(path, table.name)
                rows = wanted.touched.get(name) if name in self.masked else None
                pairs = [
                    ("gradient", wanted.gradients.get(name), found.gradients.get(name)),
                    ("weight", _touched(wanted.parameters.get(name), rows), _touched(found.parameters.get(name), rows)),
                ]
                for key in table.embedding_names:
                    pairs.append(("output", wanted.pooled.get((path, key)), found.pooled.get((path, key))))
                noted = tables.setdefault(table.name, {})
                for what, expected, actual in pairs:
                    expected = _same_rows(expected, actual)
                    if expected is not None and actual is not None:
                        noted[what] = max(noted.get(what, 0.0), largest_difference(expected, actual))


def _refuse_sharded(*models: nn.Module) -> None:
    for model in models:
        for path in sharded_collections(model):
            raise ConversionError(
                "the collection is sharded: a rank has its shards and its samples alone, and nothing that it could be "
                "compared with.",
                reason="sharded_model",
                module_path=path,
                what_to_do="verify before sharding; convert(model, sample, plan=...) does so by itself.",
            )


def _has_optimizer(weight: nn.Parameter) -> bool:
    return bool(getattr(weight, "_in_backward_optimizers", []))


def _same_rows(expected: torch.Tensor | None, actual: torch.Tensor | None) -> torch.Tensor | None:
    """Without what a mapped table has after its rows."""
    if expected is None or actual is None or expected.dim() != 2 or expected.shape[0] <= actual.shape[0]:
        return expected
    return expected[: actual.shape[0]]


def _touched(value: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor | None:
    """The rows that the batch used: a fused step moves no others, a dense one may."""
    return value if value is None or rows is None else value[rows[rows < value.shape[0]]]
