"""The registry of backends: which kernel serves a lookup, and why the others do not.

``backend="auto"`` takes the first of ``BACKENDS`` that can serve the lookup; the report tells why those before it
declined. If the user names a backend, it is used; if it cannot be, that is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from recfx.diagnostics import Diagnostic
from recfx.errors import ConversionError

if TYPE_CHECKING:
    from recfx.ir.tables import TableSpec
    from recfx.kernels.pooled_lookup import IndexView


@dataclass(frozen=True)
class LookupSpec:
    """A lookup, as backends see it.

    Args:
        tables: the descriptions of the tables, in column order.
        pooling: ``"SUM"`` or ``"MEAN"``.
        is_weighted: whether per-sample weights multiply the rows.
        weights: the tables' ``[rows, dim]`` tensors.
        optimizers: the fused optimizer of each table, or None if its gradient goes to ``weight.grad``.
    """

    tables: tuple[TableSpec, ...]
    pooling: str
    is_weighted: bool
    weights: list[torch.Tensor]
    optimizers: list[Any]


@dataclass(frozen=True)
class LookupBatch:
    """One batch for a lookup.

    Args:
        values: ``[n]`` rows, int32 or int64.
        offsets: ``[F * B + 1]`` where bags begin in ``values``.
        per_sample_weights: ``[n]``, or None.
        batch_size: ``B``.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None
    batch_size: int


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


LookupKernel = Callable[[list[torch.Tensor], LookupBatch], torch.Tensor]
"""Called with the tables' weights and a batch whose values are rows."""

FindingKernel = Callable[[list[torch.Tensor], LookupBatch, IdsToRows], torch.Tensor]
"""Finds rows and pools them in one pass: the batch's values are raw ids, or rows if ``find_views`` has None."""

Fact = tuple[torch.device, torch.dtype, torch.Size, bool]


@dataclass(frozen=True)
class Backend:
    """One target.

    Args:
        name: what the user writes in ``backend=``.
        module: where it is implemented, with ``decline(spec) -> Diagnostic | None`` and ``build(spec) ->
            LookupKernel``.
        device_types: those that it is for; on all others, ``"auto"`` passes over it without a word. Empty: all, and it
            says itself why it declines.
        finds_ids: whether it also has kernels that take raw ids: ``decline_finding(spec) -> Diagnostic | None`` for a
            lookup that it serves, and ``build_finding(kernel) -> FindingKernel`` for a kernel that ``build`` returned.
        takes_absent: whether its lookups take rows of -1, which add nothing and get no gradient.
    """

    name: str
    module: str
    device_types: tuple[str, ...] = ()
    finds_ids: bool = False
    takes_absent: bool = False

    def is_for(self, spec: LookupSpec) -> bool:
        """Whether all tables are on devices of its types."""
        return {weight.device.type for weight in spec.weights} <= set(self.device_types)

    def decline(self, spec: LookupSpec) -> Diagnostic | None:
        """None if this backend can serve ``spec``."""
        declined: Diagnostic | None = importlib.import_module(self.module).decline(spec)
        return declined

    def build(self, spec: LookupSpec) -> LookupKernel:
        """The kernel for ``spec``."""
        kernel: LookupKernel = importlib.import_module(self.module).build(spec)
        return kernel

    def decline_finding(self, spec: LookupSpec) -> Diagnostic | None:
        """None if a kernel of this backend can find the rows of ``spec`` itself."""
        if not self.finds_ids:
            message = f"backend {self.name!r} has no kernel that finds rows."
            return Diagnostic("no_finding_kernel", "", message, by=self.name)
        declined: Diagnostic | None = importlib.import_module(self.module).decline_finding(spec)
        return declined

    def build_finding(self, kernel: LookupKernel) -> FindingKernel:
        """The form of ``kernel`` that takes raw ids; both forms take part in the same fused steps."""
        finding: FindingKernel = importlib.import_module(self.module).build_finding(kernel)
        return finding


# In order of preference.
BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", "recfx.lowering.cpu", finds_ids=True, takes_absent=True),
    Backend("fbgemm", "recfx.lowering.fbgemm"),
    Backend("triton", "recfx.lowering.triton", device_types=("cuda",), takes_absent=True),
    Backend("npu", "recfx.lowering.npu", device_types=("npu",), takes_absent=True),
    Backend("fbgemm_ascend", "recfx.lowering.fbgemm_ascend", device_types=("npu",)),
    Backend("reference", "recfx.lowering.reference"),
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
    facts: list[Fact]
    finding: FindingKernel | None = None
    finding_declined: Diagnostic | None = None
    takes_absent: bool = False

    def stale(self, weights: list[torch.Tensor]) -> bool:
        """Whether a weight has since moved to another device, or changed its dtype, shape or layout."""
        return _facts(weights) != self.facts


def _facts(weights: list[torch.Tensor]) -> list[Fact]:
    return [(weight.device, weight.dtype, weight.shape, weight.is_contiguous()) for weight in weights]


def select_backend(spec: LookupSpec, backend: str, module_path: str) -> Choice:
    """Choose the backend of a lookup.

    Args:
        spec: the lookup.
        backend: ``"auto"``, or the name of a backend.
        module_path: the collection, for messages.

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
    declined: list[Diagnostic] = []
    for candidate in _candidates(spec, backend):
        refusal = candidate.decline(spec)
        if refusal is None:
            kernel, no_finding = candidate.build(spec), candidate.decline_finding(spec)
            finding = candidate.build_finding(kernel) if no_finding is None else None
            facts, takes_absent = _facts(spec.weights), candidate.takes_absent
            return Choice(candidate.name, kernel, tuple(declined), facts, finding, no_finding, takes_absent)
        declined.append(refusal)
    tables = ", ".join(table.name for table in spec.tables)
    raise ConversionError(
        f"backend {backend!r} cannot look up {tables}: " + " ".join(refusal.message for refusal in declined),
        reason="backend_unusable",
        module_path=module_path,
        what_to_do="use backend='auto', or change what stands in the way.",
    )


def can_find(spec: LookupSpec, backend: str) -> bool:
    """Whether the backend that ``select_backend`` chooses has a kernel that finds rows; none is made.

    Args:
        spec: the lookup.
        backend: ``"auto"``, or the name of a backend.
    """
    chosen = next((each for each in _candidates(spec, backend) if each.decline(spec) is None), None)
    return chosen is not None and chosen.decline_finding(spec) is None


def _candidates(spec: LookupSpec, backend: str) -> Iterator[Backend]:
    """The backends that are asked whether they can serve a lookup, in this order."""
    for candidate in BACKENDS:
        if backend == candidate.name or (backend == "auto" and (not candidate.device_types or candidate.is_for(spec))):
            yield candidate
