"""The registry of backends: which kernel serves a lookup, and why the others do not.

``backend="auto"`` takes the first of ``BACKENDS`` that serves the lookup, which follows from data alone, and is here on
this machine. The report tells why those before it declined. A named one that cannot be used is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from recfx.errors import ConversionError, Diagnostic
from recfx.ir.context import LookupFacts, OptimizerFacts, Served, TableFacts
from recfx.kernels.build import launch

if TYPE_CHECKING:
    from recfx.ir.tables import TableSpec
    from recfx.kernels.index.index_buffers import IndexView


@dataclass(frozen=True)
class LookupSpec:
    """A lookup whose tables are here."""

    tables: tuple[TableSpec, ...]  # the descriptions of the tables, in column order
    combine: str  # ``"SUM"``, ``"MEAN"`` or ``"NONE"``: what becomes of the rows of a bag
    is_weighted: bool  # whether per-sample weights multiply the rows
    weights: list[torch.Tensor]  # the tables' ``[rows, dim]`` tensors
    optimizers: list[Any]  # the fused optimizer of each table, or None if its gradient goes to ``weight.grad``

    @cached_property
    def facts(self) -> LookupFacts:
        tables = tuple(map(facts_of_table, self.weights, self.optimizers))
        return LookupFacts(self.tables, self.combine, self.is_weighted, tables)


def facts_of_table(weight: torch.Tensor, optimizer: Any) -> TableFacts:
    """What kernels are chosen by: a table that is here, as data, with its fused optimizer or None."""
    rows, dim = weight.shape
    return TableFacts(
        rows, dim, weight.dtype, weight.device.type, weight.is_contiguous() and not weight.is_neg(),
        None if optimizer is None else OptimizerFacts(*optimizer.facts), weight.requires_grad,
    )  # fmt: skip


@dataclass(frozen=True)
class LookupBatch:
    """One batch for a lookup. If rows are not combined, all ids of a feature are one bag, and ``batch_size`` is 1."""

    values: torch.Tensor  # ``[n]`` rows, int32 or int64
    offsets: torch.Tensor  # ``[F * B + 1]`` where bags begin in ``values``
    per_sample_weights: torch.Tensor | None  # ``[n]``
    batch_size: int  # ``B``
    # how many ids each feature has; empty if the host does not know, which it does if rows are not combined
    lengths: tuple[int, ...] = ()


class IdsToRows(Protocol):
    """The indexes behind a lookup whose kernel finds rows itself. The node that owns the indexes implements it."""

    training: bool  # whether ids without a row are inserted, or ids are only found

    def find_views(self) -> Sequence[IndexView | None]:
        """The index of each table of the lookup, in the lookup's order; None if the table's ids are rows.

        In training, these views share no rows: ``insert`` decides which ids share one.
        """

    def insert(self, ids: torch.Tensor, rows: torch.Tensor, absent_per_table: list[int]) -> None:
        """Give rows to ids that have none, in training, and initialise their weights: fill in ``rows``, int64 ``[n]``,
        where they are -1. Those of ids that read zeros stay -1. If it raises, nothing but ``rows`` has changed.
        """

    def answered(self, absent_per_table: list[int]) -> None:
        """Called after a lookup without ``insert`` with the number of ids per table that had no row of their own."""


Outputs = tuple[torch.Tensor, ...]
"""What a lookup returns: one tensor, float32 ``[B, sum D]``; if the rows of a bag are not combined, one for each key,
``[n, D]``, a row for each of its ids."""

LookupKernel = Callable[[list[torch.Tensor], LookupBatch], Outputs]
"""Called with the tables' weights and a batch whose values are rows."""

FindingKernel = Callable[[list[torch.Tensor], LookupBatch, IdsToRows], Outputs]
"""Finds rows and pools them in one pass: the batch's values are raw ids, or rows if ``find_views`` has None."""

WeightFacts = tuple[torch.device, torch.dtype, torch.Size, bool]
"""Where the weight of a table is, its dtype, its shape, and whether its rows lie one after the other."""


def facts_of_weights(weights: Sequence[torch.Tensor]) -> list[WeightFacts]:
    """What a kernel was chosen for, and what may change afterwards."""
    # The last: whether kernels that address its memory read its numbers there, row after row.
    return [
        (weight.device, weight.dtype, weight.shape, weight.is_contiguous() and not weight.is_neg())
        for weight in weights
    ]


@dataclass(frozen=True)
class Backend:
    """One target."""

    name: str  # what the user writes in ``backend=``, where the form of a target's kernels may be left out
    # Where it is implemented, with ``build(spec) -> LookupKernel``. Unless it serves all that the fields below allow,
    # it has ``serves(lookup, chip) -> Diagnostic | None``, which sees data alone; unless it runs wherever recfx does,
    # ``is_here(device) -> Diagnostic | None``; if kernels have several forms, ``form(device_type) -> str``, which
    # runs there (``""``: the plain one); and if it has kernels that take raw ids, ``serves_finding(lookup) ->
    # Diagnostic | None``, and ``build_finding(kernel) -> FindingKernel`` for a kernel that ``build`` returned.
    module: str
    device_types: tuple[str, ...] = ()  # that it is for; ``"auto"`` passes over it without a word on others. Empty: all
    serves_on: tuple[str, ...] = ()  # whose tables it can serve, all of a lookup on one device. Empty: any
    # Whether its pooled lookups take rows of -1, which add nothing and get no gradient. Other lookups always do.
    takes_absent: bool = False
    # Whether its pooled lookups read no id that is in no bag, and the host need not know how many ids each key has.
    takes_masked: bool = False
    finds_rows_on: tuple[str, ...] = ()  # where its kernel finds rows in indexes that are only read
    dtypes: tuple[torch.dtype, ...] = ()  # of the tables, whose rows are contiguous and not negated. Empty: any

    def serves(self, lookup: LookupFacts, chip: str | None = None) -> Diagnostic | None:
        """None if this backend serves ``lookup``, wherever its devices are; within the limits of an NPU, ``chip``."""
        return self._said(self._unsuited(lookup) or self._serves(lookup, chip))

    def is_here(self, device: torch.device) -> Diagnostic | None:
        """None if what this backend needs for ``device``, which is of a type that it serves, is on this machine."""
        is_here = getattr(self._target, "is_here", None)
        return self._said(None if is_here is None else is_here(device))

    def decline(self, spec: LookupSpec) -> Diagnostic | None:
        """None if this backend serves ``spec``, and is here."""
        return self.decline_on([weight.device for weight in spec.weights], spec.facts)

    def decline_on(self, devices: Sequence[torch.device], lookup: LookupFacts) -> Diagnostic | None:
        """None if this backend serves ``lookup``, whose tables are on these devices, and is here."""
        device = devices[0]
        return self._said(
            self._unsuited(lookup, several=device.type != "cpu" and len(set(devices)) > 1)
            or self.is_here(device)
            or self._serves(lookup, launch.chip_name(device))
        )

    def label(self, device_type: str) -> str:
        """What graphs and reports call it on devices of a type: its name, and the form of its kernels in brackets."""
        form = getattr(self._target, "form", None)
        of_kernels = "" if form is None else form(device_type)
        return f"{self.name}[{of_kernels}]" if of_kernels else self.name

    def is_called(self, backend: str, lookup: LookupFacts) -> bool:
        """Whether ``backend`` is its name, without the form or with it, or its label where the lookup's tables are."""
        labels = map(self.label, lookup.device_types if backend.startswith(f"{self.name}[") else ())
        return backend in (self.name, self.name.partition("[")[0]) or backend in labels

    def build(self, spec: LookupSpec) -> LookupKernel:
        return self._target.build(spec)

    def serves_finding(self, lookup: LookupFacts) -> Diagnostic | None:
        """None if a kernel of this backend, which serves ``lookup``, can find its rows itself."""
        serves = getattr(self._target, "serves_finding", None)
        message = f"backend {self.name!r} has no kernel that finds rows."
        return self._said(Diagnostic("no_finding_kernel", "", message) if serves is None else serves(lookup))

    def build_finding(self, kernel: LookupKernel) -> FindingKernel:
        """The form of ``kernel`` that takes raw ids; both forms take part in the same fused steps."""
        return self._target.build_finding(kernel)

    def _said(self, declined: Diagnostic | None) -> Diagnostic | None:
        return None if declined is None else replace(declined, by=self.name)

    @property
    def _target(self) -> ModuleType:
        return importlib.import_module(self.module)

    def _serves(self, lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
        serves = getattr(self._target, "serves", None)
        return None if serves is None else serves(lookup, chip)

    def _unsuited(self, lookup: LookupFacts, several: bool = False) -> Diagnostic | None:
        """Why it has no kernels for such a lookup; ``several``: the tables are on several devices of one type."""
        types = lookup.device_types
        if self.serves_on and (len(types) > 1 or not types <= set(self.serves_on) or several):
            serves = "the CPU" if self.serves_on == ("cpu",) else " and ".join(self.serves_on)
            message = f"the tables are on {'/'.join(sorted(types))}; this target is for {serves}."
            return Diagnostic("device", "", message)
        if self.dtypes and (len(lookup.dtypes) != 1 or not lookup.dtypes <= set(self.dtypes)):
            taken, given = (", ".join(sorted(map(str, dtypes))) for dtypes in (self.dtypes, lookup.dtypes))
            return Diagnostic("dtype", "", f"a lookup takes tables of one of {taken}, not of {given}.")
        if self.dtypes and not lookup.is_contiguous:
            return Diagnostic("not_contiguous", "", "a table's rows are not contiguous, or a view negates them.")
        return None


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# In order of preference.
BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", "recfx.lowering.cpu", serves_on=("cpu",), takes_absent=True, dtypes=_FLOATS),
    Backend("fbgemm", "recfx.lowering.fbgemm", serves_on=("cpu",), dtypes=(torch.float32, torch.float16)),
    Backend(
        "triton", "recfx.lowering.triton.target", ("cuda",), serves_on=("cuda", "cpu"), takes_absent=True,
        takes_masked=True, finds_rows_on=("cuda", "cpu"), dtypes=_FLOATS,
    ),
    Backend(
        "npu", "recfx.lowering.triton.npu", ("npu",), serves_on=("npu",), takes_absent=True, takes_masked=True,
        finds_rows_on=("npu",), dtypes=_FLOATS,
    ),
    Backend(
        "npu[vendor]", "recfx.lowering.triton.vendor", ("npu",), serves_on=("npu",), takes_absent=True, dtypes=_FLOATS
    ),
    Backend("reference", "recfx.lowering.reference"),
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The backend that serves a lookup."""

    backend: str  # its label
    kernel: LookupKernel  # what to call
    declined: tuple[Diagnostic, ...]  # the backends that come before it, and why they were not chosen
    facts: list[WeightFacts]  # of every weight at the time of the choice
    finding: FindingKernel | None = None  # what to call with raw ids; None if no kernel of the backend finds rows
    takes_absent: bool = False  # see ``Backend``, as for the next one
    takes_masked: bool = False

    def stale(self, weights: list[torch.Tensor]) -> bool:
        """Whether a weight has since moved to another device, or changed its dtype, shape or layout."""
        return facts_of_weights(weights) != self.facts


def select_backend(spec: LookupSpec, backend: str, module_path: str) -> Choice:
    """Choose the backend of a lookup, and make its kernel; arguments and errors are those of ``choose_backend``."""
    chosen, declined = choose_backend(spec.facts, backend, module_path, spec.weights)
    kernel = chosen.build(spec)
    finding = chosen.build_finding(kernel) if chosen.serves_finding(spec.facts) is None else None
    label = chosen.label(spec.weights[0].device.type)
    takes = chosen.takes_absent, chosen.takes_masked
    return Choice(label, kernel, declined, facts_of_weights(spec.weights), finding, *takes)


def choose_backend(
    lookup: LookupFacts, backend: str, module_path: str, weights: Sequence[torch.Tensor] = ()
) -> tuple[Backend, tuple[Diagnostic, ...]]:
    """Choose the backend of a lookup among those of this machine; also returns why those before it decline.

    ``weights`` are the tables, which tell one device from another of its type.

    Raises:
        ConversionError: ``unknown_backend``; ``backend_unusable`` if the named one cannot serve the lookup.
    """
    names = [candidate.name for candidate in BACKENDS]
    if backend != "auto" and not any(candidate.is_called(backend, lookup) for candidate in BACKENDS):
        raise ConversionError(
            f"there is no backend {backend!r}.",
            reason="unknown_backend",
            module_path=module_path,
            what_to_do=f"use 'auto' or one of {names}.",
        )
    devices = [weight.device for weight in weights] or [torch.device(kind) for kind in sorted(lookup.device_types)]
    chosen, declined = first_backend(lookup, backend, lambda candidate: candidate.decline_on(devices, lookup))
    if chosen is not None:
        return chosen, declined
    tables = ", ".join(table.name for table in lookup.tables)
    raise ConversionError(
        f"backend {backend!r} cannot look up {tables}: " + " ".join(refusal.message for refusal in declined),
        reason="backend_unusable",
        module_path=module_path,
        what_to_do="use backend='auto', or change what stands in the way.",
    )


def first_backend(
    lookup: LookupFacts, backend: str, decline: Callable[[Backend], Diagnostic | None]
) -> tuple[Backend | None, tuple[Diagnostic, ...]]:
    """The first backend that does not decline, and why those before it do."""
    declined: list[Diagnostic] = []
    for candidate in BACKENDS:
        is_for = not candidate.device_types or lookup.device_types <= set(candidate.device_types)
        if candidate.is_called(backend, lookup) or (backend == "auto" and is_for):
            refusal = decline(candidate)
            if refusal is None:
                return candidate, tuple(declined)
            is_said = any(candidate.is_called(one.by, lookup) and one.message == refusal.message for one in declined)
            declined += [] if is_said else [refusal]  # forms of one target decline for the same reasons
    return None, tuple(declined)


@dataclass(frozen=True)
class TargetsHere:
    """The kernel targets of this machine; ``backend`` is ``"auto"``, or the one that every lookup must use."""

    backend: str = "auto"

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        chosen, declined = choose_backend(lookup, self.backend, collection)
        return Served(chosen.label(lookup.facts[0].device), declined, chosen.serves_finding(lookup))

    def may_name(self, backend: str) -> bool:
        return True

    def find_rows(self, device: str) -> Served:
        declined: list[Diagnostic] = []
        for candidate in BACKENDS:
            kind = device.partition(":")[0]
            if kind in candidate.finds_rows_on:
                refusal = self._absent(candidate, device)
                if refusal is None:
                    return Served(candidate.label(kind), tuple(declined))
                declined.append(refusal)
        return Served("reference", tuple(declined))

    def _absent(self, candidate: Backend, device: str) -> Diagnostic | None:
        return candidate.is_here(torch.device(device))

    def index_operators(self, device: str) -> str:
        return "" if device == "meta" else "cpu" if device == "cpu" else "reference"


@dataclass(frozen=True)
class PlannedTargets(TargetsHere):
    """The kernel targets of machines that are not here, on which everything that targets need is installed. A lookup
    that the named backend does not serve has none.
    """

    chip: str | None = None  # the name of the NPU whose limits count; None if none do

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        chosen, declined = first_backend(lookup, self.backend, lambda one: one.serves(lookup, self.chip))
        if chosen is None:
            message = f"backend {self.backend!r} does not serve the lookup."
            return Served("", declined, Diagnostic("no_finding_kernel", "", message, by=self.backend))
        return Served(chosen.label(lookup.facts[0].device), declined, chosen.serves_finding(lookup))

    def _absent(self, candidate: Backend, device: str) -> Diagnostic | None:
        return None
