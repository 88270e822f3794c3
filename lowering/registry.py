"""The registry of backends: which kernel serves a lookup, and why the others do not.

``backend="auto"`` takes the first of ``BACKENDS`` that can serve the lookup; the refusals of those before it go into
the report. A backend that the user names is used, or it is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
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
    """A lookup, as a backend sees it.

    Args:
        tables: descriptions, in column order.
        pooling: ``"SUM"`` or ``"MEAN"``.
        is_weighted: whether per-sample weights multiply the rows.
        weights: the tables' ``[rows, dim]`` tensors.
        optimizers: the fused optimizer of each table, or None where gradients go to ``weight.grad``.
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
    """The indexes behind a lookup whose kernel finds rows itself: made by the node that owns them.

    Attributes:
        training: find or insert, or find only.
    """

    training: bool

    def find_views(self) -> Sequence[IndexView | None]:
        """The index of each table of the lookup, in its order; None: the table's ids are rows.

        In training they share no rows: ``insert`` says who does.
        """

    def insert(self, ids: torch.Tensor, rows: torch.Tensor, absent_per_table: list[int]) -> None:
        """Give rows to ids that have none, in training; may raise, and then nothing has changed but ``rows``.

        Args:
            ids: ``[n]`` int64, the lookup's batch.
            rows: ``[n]`` int64, -1 where an id has no row; filled in, and the weights of new rows initialised. Stays
                -1 where the answer is zeros: such an id adds nothing and gets no gradient.
            absent_per_table: how many ids without a row each table of the lookup has; not all are 0.
        """

    def answered(self, absent_per_table: list[int]) -> None:
        """Told after a lookup without ``insert`` how many ids of each table had no row of their own."""


LookupKernel = Callable[[list[torch.Tensor], LookupBatch], torch.Tensor]
"""Called with the tables' weights and a batch whose values are rows."""

FindingKernel = Callable[[list[torch.Tensor], LookupBatch, IdsToRows], torch.Tensor]
"""Finds rows and pools them in one pass: the batch's values are raw ids, or rows where ``find_views`` has None."""

Fact = tuple[torch.device, torch.dtype, torch.Size, bool]


@dataclass(frozen=True)
class Backend:
    """One target.

    Args:
        name: what the user writes in ``backend=``.
        module: where it is implemented: ``decline(spec) -> Diagnostic | None`` and ``build(spec) -> LookupKernel``.
        finds_ids: whether it also has kernels that start from raw ids: ``decline_finding(spec) -> Diagnostic | None``
            for a lookup that it serves, and ``build_finding(kernel) -> FindingKernel`` for what ``build`` has given.
    """

    name: str
    module: str
    finds_ids: bool = False

    def decline(self, spec: LookupSpec) -> Diagnostic | None:
        """None where this backend can serve ``spec``."""
        declined: Diagnostic | None = importlib.import_module(self.module).decline(spec)
        return declined

    def build(self, spec: LookupSpec) -> LookupKernel:
        """The kernel for ``spec``."""
        kernel: LookupKernel = importlib.import_module(self.module).build(spec)
        return kernel

    def decline_finding(self, spec: LookupSpec) -> Diagnostic | None:
        """None where a kernel of this backend can find the rows of ``spec`` itself."""
        if not self.finds_ids:
            message = f"backend {self.name!r} has no kernel that finds rows."
            return Diagnostic("no_finding_kernel", "", message, by=self.name)
        declined: Diagnostic | None = importlib.import_module(self.module).decline_finding(spec)
        return declined

    def build_finding(self, kernel: LookupKernel) -> FindingKernel:
        """The form of ``kernel`` that starts from raw ids; the two take fused steps together."""
        finding: FindingKernel = importlib.import_module(self.module).build_finding(kernel)
        return finding


# In order of preference. ``cpu`` shares a lookup among threads, which FBGEMM's forward does not, and is as fast on one.
BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", "recfx.lowering.cpu", finds_ids=True),
    Backend("fbgemm", "recfx.lowering.fbgemm"),
    Backend("reference", "recfx.lowering.reference"),
)


@dataclass(frozen=True)
class Choice:
    """The backend that serves a lookup.

    Args:
        backend: its name.
        kernel: what to call.
        declined: the backends that come before it, and why they were not taken.
        facts: device, dtype, shape and layout of every weight, for which it was chosen.
        finding: what to call with raw ids; None where the backend has no kernel that finds rows.
        finding_declined: why it has none.
    """

    backend: str
    kernel: LookupKernel
    declined: tuple[Diagnostic, ...]
    facts: list[Fact]
    finding: FindingKernel | None = None
    finding_declined: Diagnostic | None = None

    def stale(self, weights: list[torch.Tensor]) -> bool:
        """Whether a weight has moved to another device, or changed dtype, shape or layout since."""
        return _facts(weights) != self.facts


def _facts(weights: list[torch.Tensor]) -> list[Fact]:
    return [(weight.device, weight.dtype, weight.shape, weight.is_contiguous()) for weight in weights]


def select_backend(spec: LookupSpec, backend: str, module_path: str) -> Choice:
    """Choose the backend of a lookup.

    Args:
        spec: the lookup.
        backend: ``"auto"``, or one name.
        module_path: the collection, for messages.

    Raises:
        ConversionError: ``unknown_backend``; ``backend_unusable`` where the named one cannot serve the lookup.
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
    for candidate in BACKENDS:
        if backend not in ("auto", candidate.name):
            continue
        refusal = candidate.decline(spec)
        if refusal is None:
            kernel, no_finding = candidate.build(spec), candidate.decline_finding(spec)
            finding = candidate.build_finding(kernel) if no_finding is None else None
            return Choice(candidate.name, kernel, tuple(declined), _facts(spec.weights), finding, no_finding)
        declined.append(refusal)
    tables = ", ".join(table.name for table in spec.tables)
    raise ConversionError(
        f"backend {backend!r} cannot look up {tables}: " + " ".join(refusal.message for refusal in declined),
        reason="backend_unusable",
        module_path=module_path,
        what_to_do="use backend='auto', or change what it names.",
    )
