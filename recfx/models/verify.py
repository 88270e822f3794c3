"""``recfx.verify``: is the converted model the original one? Outputs, gradients and one optimizer step, on copies."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recfx.collections.collection import unsharded_collections
from recfx.collections.converted_collection import converted_collections
from recfx.collections.copy_modules import copy_with_tensors
from recfx.collections.kinds import kind_of, standard_kind
from recfx.collections.replaced import REPLACED, calls_refused, refuse_calls
from recfx.collections.wrappers import not_on_meta_by_default, unwrap
from recfx.errors import ConversionError, RecfxError, told_by
from recfx.errors.argument_types import typed
from recfx.models.compare_models import Run, batch_sizes, compare_twice, largest_difference, run_step, touched
from recfx.models.reference_model import attach_optimizers, copy_fused_state, reference_of
from recfx.models.sample import Sample, fixed_randomness
from recfx.models.verify_report import DIFFERENT, REFUSED_SAMPLE, SKIPPED, Check, VerifyReport
from recfx.runtime.in_flight import on_a_copy


class Comparison:
    """Collects the results; only copies of the models are run, so the models are never changed."""

    def __init__(self, original: nn.Module, converted: nn.Module, rtol: float, atol: float) -> None:
        self.original, self.converted = original, converted
        self.checks: list[Check] = []
        self.tables: dict[str, dict[str, dict[str, float]]] = {}
        self.called: set[str] = set()
        self.collections = unsharded_collections(converted)
        self.has_index = any(len(collection.hash_indexes) for collection in self.collections.values())
        kept = {id(module) for module in converted.modules()}
        self.originals = {
            path: module
            for path, module in original.named_modules()
            if standard_kind(module) is not None and id(module) not in kept
        }
        fused = {
            kind_of(collection).weight_name(path, table): optimizer
            for path, collection in self.collections.items()
            for table, optimizer in collection.fused_optimizers().items()
        }
        self.fused = set(fused)
        # Only here may rows that the batch did not use differ: the dense rule updates them, the fused one does not.
        self.masked = frozenset(name for name, one in fused.items() if one.rule.unlike_dense(one.group))
        self.rtol, self.atol = rtol, atol

    def skip(self, mode: str, batch: str, where: str, message: str, what_to_do: str = "") -> None:
        self.checks.append(Check(mode, batch, "run", where, SKIPPED, message=message, what_to_do=what_to_do))

    def compare(self, mode: str, batch: str, call: Sample) -> None:
        """Run the reference model and the converted model, each on copies, and compare."""
        training = mode == "train"
        try:
            subject = copy_with_tensors(self.converted).train(training)
            attach_optimizers(self.converted, subject, skip=self.fused)
        except Exception as error:  # whatever the user's modules raise when they are copied
            self.skip(mode, batch, "copy", f"the model cannot be copied ({type(error).__name__}: {error})")
            return
        calls_of_tables = [(table, one.calls) for one in self.collections.values() for table in one.tables]
        if training and any(table.admits and calls > 1 for table, calls in calls_of_tables):
            self.skip(mode, batch, "hash_ids", "one forward calls a collection several times, and ids may be admitted "
                      "between the calls, which the standard collection cannot reproduce")  # fmt: skip
            return
        hashed, failure = self._hash_sample(call) if training and self.has_index else (subject, None)
        try:
            expected = self._run_reference(hashed, call, training)
        except Exception as error:  # the model itself fails, so there is nothing to compare with
            if isinstance(error, RecfxError) and error.reason == REPLACED:
                self.checks.append(_refused_or_failed(mode, batch, error))
                return
            message, what_to_do = told_by(error, "")
            ours = _own_error(subject, call, training)
            if ours is not None:
                also, advice = told_by(ours, "")
                message, what_to_do = f"{message} The converted model: {also}", what_to_do or advice
            self.skip(mode, batch, "original", f"the original raises {message}", what_to_do)
            return
        self.called |= expected.called
        try:
            if failure is not None:
                raise failure
            actual = run_step(subject, call, training, self.originals)
        except Exception as error:
            self.checks.append(_refused_or_failed(mode, batch, error))
            return

        def again() -> Run:
            kept = hashed if training else copy_with_tensors(self.converted).eval()  # the state before the step
            return self._run_reference(kept, call, training)

        checks = compare_twice(expected, actual, again, self.rtol, self.atol, self.masked)
        self.checks += [replace(check, mode=mode, batch=batch) for check in checks]
        self._note_tables(expected, actual)

    def _note_tables(self, expected_run: Run, actual_run: Run) -> None:
        """Note the largest differences of each table."""
        runs = (expected_run, actual_run)
        for path, collection in self.collections.items():
            for table in collection.tables:
                name = kind_of(collection).weight_name(path, table.name)
                rows = expected_run.touched.get(name) if name in self.masked else None
                noted = self.tables.setdefault(path, {}).setdefault(table.name, {})
                for what, (expected, actual) in (
                    ("gradient", [run.gradients.get(name) for run in runs]),
                    ("weight", [touched(run.parameters.get(name), rows) for run in runs]),
                    *(("output", [run.pooled.get((path, key)) for run in runs]) for key in table.embedding_names),
                ):
                    if expected is not None and actual is not None:
                        noted[what] = max(noted.get(what, 0.0), largest_difference(expected, actual))

    def _hash_sample(self, call: Sample) -> tuple[nn.Module, Exception | None]:
        """A copy of the converted model in which the sample's ids are hashed; and the error if that failed."""
        hashed = copy_with_tensors(self.converted).train()
        hashed_call = call.clone()
        try:
            with fixed_randomness(), torch.no_grad(), on_a_copy(), calls_refused(self.originals):
                hashed(*hashed_call.args, **hashed_call.kwargs)
        except Exception as error:  # the caller compares it with what the original does
            return self.converted, error
        for path in self.collections:
            refuse_calls(hashed.get_submodule(path), path)  # in case that code keeps it
        return hashed, None

    def _run_reference(self, subject: nn.Module, call: Sample, training: bool) -> Run:
        """One step of the original; with an index, over copies of the tables of ``subject``, which stays as it is."""
        reference = reference_of(self.original, subject)
        attach_optimizers(self.original, reference, skip=set())
        if self.has_index:
            copy_fused_state(subject, reference)
        return run_step(reference, call, training, self.originals)


def _own_error(converted: nn.Module, call: Sample, training: bool) -> RecfxError | None:
    """What recfx says, with what to do, about a batch on which the original fails; None if it has nothing to say."""
    try:
        run_step(converted, call, training)
    except RecfxError as error:
        return error
    except Exception:  # of the user's modules, as the original's, which is reported
        return None
    return None


def _refused_or_failed(mode: str, batch: str, error: Exception) -> Check:
    if isinstance(error, RecfxError) and error.reason == REPLACED:
        why = error.diagnostic
        return Check(mode, batch, "calls", why.path, DIFFERENT, float("inf"), why.message, why.what_to_do)
    if isinstance(error, RecfxError):  # such as a full table; the message says what to do
        return Check(mode, batch, "run", REFUSED_SAMPLE, DIFFERENT, float("inf"), *told_by(error, ""))
    message = f"raises {type(error).__name__}: {error}"
    return Check(mode, batch, "run", "converted", DIFFERENT, float("inf"), message)


# Tables below float32 are pooled in another precision by the standard collection.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2}


@typed(ConversionError)
def verify(
    original: nn.Module, converted: nn.Module, sample: Any, *, rtol: float = 1e-5, atol: float = 1e-6
) -> VerifyReport:
    """Compare a converted model with the original: outputs, gradients and one step, train and eval, two batch sizes.

    Works on copies, so random states, indexes, norms and gradients of both models stay as they are. The step is SGD if
    no optimizer runs in the backward. A hashed table is compared with the standard collection, whose ids are mapped
    through ``items()``.

    Example:
        >>> model = Model()
        >>> report = recfx.verify(model, recfx.convert(model), sample)
        >>> report.ok
        True

    Args:
        original: the model with standard collections.
        converted: what ``convert`` made of it.
        sample: one call, as for ``convert``.
        rtol: relative tolerance; at least 1e-2 with float16 tables and 2e-2 with bfloat16 ones.
        atol: absolute tolerance, likewise.

    Raises:
        ConversionError: ``invalid_argument``; ``sharded_model``: one rank does not hold the whole model.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConversionError(
                f"{name} is {value!r}.",
                reason="invalid_argument",
                what_to_do=f"pass a finite number that is not below 0 for {name}.",
            )
    with torch.inference_mode(False), torch.enable_grad(), not_on_meta_by_default():  # whatever the caller's modes are
        return _verify(original, converted, Sample.of(sample), rtol, atol)


def _verify(original: nn.Module, converted: nn.Module, call: Sample, rtol: float, atol: float) -> VerifyReport:
    _refuse_sharded(original, converted)
    original, converted = unwrap(original), unwrap(converted)
    is_standard = not converted_collections(converted) and any(map(standard_kind, converted.modules()))
    if is_standard and converted_collections(original):
        raise ConversionError(
            "the arguments are swapped: the collections of the first model are converted, those of the second are not.",
            reason="invalid_argument",
            what_to_do="call recfx.verify(original, converted, sample).",
        )
    if call.on_meta(converted):
        message = "the model is on the meta device, where nothing can be computed"
        return VerifyReport((Check("", "", "run", "meta", SKIPPED, message=message),), rtol=rtol, atol=atol)
    floor = max([_TOLERANCE.get(parameter.dtype, 0.0) for parameter in converted.parameters()], default=0.0)
    comparison = Comparison(original, converted, max(rtol, floor), max(atol, floor))
    for batch, sized in batch_sizes(call):
        for mode in ("train", "eval"):
            if sized is None:
                comparison.skip(mode, batch, "sample", "the sample's batch size is unknown")
            else:
                with _nothing_collected():
                    comparison.compare(mode, batch, sized)
    return VerifyReport(
        tuple(comparison.checks), comparison.tables, comparison.rtol, comparison.atol, comparison.called
    )


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """A context in which Python does not look for garbage, as copies of thousands of tables make it do all the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _refuse_sharded(*models: nn.Module) -> None:
    for model in models:
        for path, collection in converted_collections(model).items():
            if collection.is_sharded:
                raise ConversionError(
                    "the collection is sharded: a rank has only its own shards and samples, and nothing to compare "
                    "them with.",
                    reason="sharded_model",
                    module_path=path,
                    what_to_do="verify before sharding; convert(model, sample, plan=...) does so by itself.",
                )
