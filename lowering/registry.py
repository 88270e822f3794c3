"""The registry of backends: which kernel serves a lookup, and why the others do not.

``backend="auto"`` takes the first of ``BACKENDS`` that can serve the lookup; the report tells why those before it
declined. If the user names a backend, it is used; if it cannot be, that is an error.

A backend answers two questions apart: what it serves, which follows from data alone (``Backend.serves``), and whether
it is here, on this machine (``Backend.is_here``). ``select_backend`` asks both, ``PlannedTargets`` the first.
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
from recfx.ir.context import LookupFacts, TableFacts
from recfx.kernels.build import launch

if TYPE_CHECKING:
    from recfx.ir.tables import TableSpec
    from recfx.kernels.index.index_buffers import IndexView


@dataclass(frozen=True)
class LookupSpec:
    """A lookup whose tables are here.

    Args:
        tables: the descriptions of the tables, in column order.
        combine: ``"SUM"``, ``"MEAN"`` or ``"NONE"``: what becomes of the rows of a bag.
        is_weighted: whether per-sample weights multiply the rows.
        weights: the tables' ``[rows, dim]`` tensors.
        optimizers: the fused optimizer of each table, or None if its gradient goes to ``weight.grad``.
    """

    tables: tuple[TableSpec, ...]
    combine: str
    is_weighted: bool
    weights: list[torch.Tensor]
    optimizers: list[Any]

    @cached_property
    def facts(self) -> LookupFacts:
        tables = tuple(map(facts_of_table, self.weights, self.optimizers))
        return LookupFacts(self.tables, self.combine, self.is_weighted, tables)


def facts_of_table(weight: torch.Tensor, optimizer: Any) -> TableFacts:
    """What kernels are chosen by: a table that is here, as data, with its fused optimizer or None."""
    rows, dim = weight.shape
    return TableFacts(
        rows,
        dim,
        weight.dtype,
        weight.device.type,
        weight.is_contiguous() and not weight.is_neg(),
        None if optimizer is None else optimizer.facts,
        weight.requires_grad,
    )


@dataclass(frozen=True)
class LookupBatch:
    """One batch for a lookup.

    Args:
        values: ``[n]`` rows, int32 or int64.
        offsets: ``[F * B + 1]`` where bags begin in ``values``.
        per_sample_weights: ``[n]``, or None.
        batch_size: ``B``. It is 1 if the rows of a bag are not combined: all ids of a feature are one bag.
        lengths: how many ids each feature has, if the rows of a bag are not combined; else empty.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None
    batch_size: int
    lengths: tuple[int, ...] = ()


class IdsToRows(Protocol):
    """The indexes behind a lookup whose kernel finds rows itself. The node that owns the indexes implements it.

    Attributes:
        training: whether ids without a row are inserted, or ids are only found.
    """

    training: bool

    def find_views(self) -> Sequence[IndexView | None]:
        """The index of each table of the lookup, in the lookup's order; None if the table's ids are rows.

        In training, these views share no rows: ``insert`` decides which ids share one.
        """

    def insert(self, ids: torch.Tensor, rows: torch.Tensor, absent_per_table: list[int]) -> None:
        """Give rows to ids that have none, in training. If it raises, nothing but ``rows`` has changed.

        Args:
            ids: ``[n]`` int64, the lookup's batch.
            rows: ``[n]`` int64, -1 if an id has no row. They are filled in, and the weights of new rows are
                initialised. If the answer for an id is zeros, its row remains -1: such an id adds nothing and gets no
                gradient.
            absent_per_table: how many ids without a row each table of the lookup has; not all are 0.
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
    """One target.

    Args:
        name: what the user writes in ``backend=``.
        module: where it is implemented, with ``build(spec) -> LookupKernel``. Unless it serves all that the fields
            below allow, it has ``serves(lookup, chip) -> Diagnostic | None``, which sees data alone; unless it runs
            wherever recfx does, ``is_here(device) -> Diagnostic | None``.
        device_types: those that it is for; on all others, ``"auto"`` passes over it without a word. Empty: all, and it
            says itself why it declines.
        serves_on: the types of devices whose tables it can serve, all of a lookup on one device. Empty: any.
        finds_ids: whether it also has kernels that take raw ids: ``serves_finding(lookup) -> Diagnostic | None`` for a
            lookup that it serves, and ``build_finding(kernel) -> FindingKernel`` for a kernel that ``build`` returned.
        takes_absent: whether its pooled lookups take rows of -1, which add nothing and get no gradient. Lookups that do
            not combine rows always take them: they read zeros.
        combines: what its kernels can make of the rows of a bag.
        finds_rows_on: the types of devices on which its kernel finds rows in indexes that are only read.
        dtypes: all tables of a lookup have one of these, and rows that are contiguous and not negated. Empty: any.
    """

    name: str
    module: str
    device_types: tuple[str, ...] = ()
    serves_on: tuple[str, ...] = ()
    finds_ids: bool = False
    takes_absent: bool = False
    combines: tuple[str, ...] = ("SUM", "MEAN")
    finds_rows_on: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    def serves(self, lookup: LookupFacts, chip: str | None = None) -> Diagnostic | None:
        """None if this backend serves ``lookup``, wherever its devices are.

        Args:
            lookup: the lookup.
            chip: the name of the NPU, whose limits count as well; None if it does not matter.
        """
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

    def build(self, spec: LookupSpec) -> LookupKernel:
        return self._target.build(spec)

    def serves_finding(self, lookup: LookupFacts) -> Diagnostic | None:
        """None if a kernel of this backend, which serves ``lookup``, can find its rows itself."""
        if not self.finds_ids:
            message = f"backend {self.name!r} has no kernel that finds rows."
            return self._said(Diagnostic("no_finding_kernel", "", message))
        return self._said(self._target.serves_finding(lookup))

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
        if lookup.combine not in self.combines:
            message = f"backend {self.name!r} has no kernel with combine={lookup.combine}."
            return Diagnostic("unsupported_combine", "", message)
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
    Backend(
        "cpu",
        "recfx.lowering.cpu",
        serves_on=("cpu",),
        finds_ids=True,
        takes_absent=True,
        combines=("SUM", "MEAN", "NONE"),
        dtypes=_FLOATS,
    ),
    Backend("fbgemm", "recfx.lowering.fbgemm", serves_on=("cpu",), dtypes=(torch.float32, torch.float16)),
    Backend(
        "triton",
        "recfx.lowering.triton.target",
        ("cuda",),
        serves_on=("cuda", "cpu"),
        takes_absent=True,
        combines=("SUM", "MEAN", "NONE"),
        finds_rows_on=("cuda", "cpu"),
        dtypes=_FLOATS,
    ),
    Backend(
        "npu",
        "recfx.lowering.triton.target",
        ("npu",),
        serves_on=("npu",),
        takes_absent=True,
        combines=("SUM", "MEAN", "NONE"),
        finds_rows_on=("npu",),
        dtypes=_FLOATS,
    ),
    Backend("reference", "recfx.lowering.reference", combines=("SUM", "MEAN", "NONE")),
)


@dataclass(frozen=True)
class Choice:
    """The backend that serves a lookup.

    Args:
        backend: its name.
        kernel: what to call.
        declined: the backends that come before it, and why they were not chosen.
        facts: the device, dtype, shape and layout of every weight at the time of the choice.
        finding: what to call with raw ids; None if the backend has no kernel that finds rows.
        finding_declined: why there is no such kernel.
        takes_absent: see ``Backend``.
    """

    backend: str
    kernel: LookupKernel
    declined: tuple[Diagnostic, ...]
    facts: list[WeightFacts]
    finding: FindingKernel | None = None
    finding_declined: Diagnostic | None = None
    takes_absent: bool = False

    def stale(self, weights: list[torch.Tensor]) -> bool:
        """Whether a weight has since moved to another device, or changed its dtype, shape or layout."""
        return facts_of_weights(weights) != self.facts


def select_backend(spec: LookupSpec, backend: str, module_path: str) -> Choice:
    """Choose the backend of a lookup, and make its kernel; arguments and errors are those of ``choose_backend``."""
    chosen, declined = choose_backend(spec.facts, backend, module_path, spec.weights)
    kernel, no_finding = chosen.build(spec), chosen.serves_finding(spec.facts)
    finding = chosen.build_finding(kernel) if no_finding is None else None
    return Choice(
        chosen.name, kernel, declined, facts_of_weights(spec.weights), finding, no_finding, chosen.takes_absent
    )


def choose_backend(
    lookup: LookupFacts, backend: str, module_path: str, weights: Sequence[torch.Tensor] = ()
) -> tuple[Backend, tuple[Diagnostic, ...]]:
    """Choose the backend of a lookup among those of this machine; also returns why those before it decline.

    Args:
        lookup: the lookup.
        backend: ``"auto"``, or the name of a backend.
        module_path: the collection, for messages.
        weights: the tables, which tell one device from another of its type.

    Raises:
        ConversionError: ``unknown_backend``; ``backend_unusable`` if the named one cannot serve the lookup.
    """
    names = [candidate.name for candidate in BACKENDS]
    if backend != "auto" and backend not in names:
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
        if backend == candidate.name or (backend == "auto" and is_for):
            refusal = decline(candidate)
            if refusal is None:
                return candidate, tuple(declined)
            declined.append(refusal)
    return None, tuple(declined)
