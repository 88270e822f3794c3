"""Target ``cpu``: recfx's own lookups on the CPU, from rows or from raw ids, and their backward in C++.

With raw ids, the lookup finds their rows itself: a thread finds some thousand ids and sums their rows right away, or
copies them. In training, the few ids that have no row yet get one afterwards, and the bags that contain them are summed
again.
"""

import torch

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.kernels.build import library
from recfx.kernels.build.huge_pages import move_to_huge_pages
from recfx.kernels.index.index_buffers import IndexView
from recfx.kernels.lookup.pooled_lookup import find_and_pool, pool_again_, pooled_lookup
from recfx.kernels.step import fused_step
from recfx.lowering.registry import FindingKernel, IdsToRows, LookupBatch, LookupKernel, LookupSpec, Outputs
from recfx.lowering.step.cpu_backward import CpuBackward
from recfx.lowering.step.trainable_lookup import LookedUp, TrainableLookup


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None for tables without an optimizer, or with one whose rule is in recfx's C++ library."""
    for optimizer in lookup.optimizers:
        if optimizer.rule not in fused_step.rules():
            return Diagnostic("optimizer", "", f"there is no step of {optimizer.rule} in C++.")
    return None


def is_here(device: torch.device) -> Diagnostic | None:
    """None if recfx's C++ library is there, or can be built."""
    return (
        None if library.load() else Diagnostic("no_library", "", f"the C++ operators are missing: {library.why_not()}.")
    )


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel for ``spec``."""
    return CpuLookup(spec)


def serves_finding(lookup: LookupFacts) -> Diagnostic | None:
    """None for sums, and for rows that are not combined. Means would be divided by lengths without the absent ids."""
    if lookup.combine == "MEAN":
        return Diagnostic("mean_from_ids", "", "a lookup from raw ids pools sums, not means.")
    return None


def build_finding(kernel: LookupKernel) -> FindingKernel:
    """The form of a kernel that looks up raw ids."""
    assert isinstance(kernel, CpuLookup)
    return kernel.from_ids


class CpuLookup:
    """The kernel of one lookup, whose weights are not kept. Its first call moves the tables to huge pages."""

    def __init__(self, spec: LookupSpec) -> None:
        backward = CpuBackward(spec)
        self._mean, self._unpooled = backward.mean, backward.unpooled
        self._table_of_feature = backward.table_of_feature
        self.trainable = TrainableLookup(backward)
        self._no_index = IndexView.none()
        self._has_moved = False

    def __call__(self, weights: list[torch.Tensor], batch: LookupBatch) -> Outputs:
        """Look up rows: ``batch.values`` are rows, or -1 for nothing."""
        if not self._has_moved:
            self._move(weights)
        rows, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)

        def forward(scale: torch.Tensor | None) -> LookedUp:
            tables, how = self._table_of_feature, (self._mean, scale, self._unpooled)
            return LookedUp(tuple(pooled_lookup(rows, offsets, weights, tables, *how)), rows)

        return self.trainable(weights, offsets, batch.per_sample_weights, forward)

    def from_ids(self, weights: list[torch.Tensor], batch: LookupBatch, ids_to_rows: IdsToRows) -> Outputs:
        """Find rows and look them up: ``batch.values`` are raw ids, or rows if a table has no index.

        Ids without a row add nothing to sums; if rows are not combined, theirs are zeros. ``serves_finding`` has
        refused means, whose lengths would leave out the ids without a row.
        """
        if not self._has_moved:
            self._move(weights)
        ids, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)

        keep_rows = ids_to_rows.training or torch.is_grad_enabled()  # a backward may follow in eval mode, too

        def forward(scale: torch.Tensor | None) -> LookedUp:
            return self._find_insert_pool(weights, ids, offsets, scale, ids_to_rows, keep_rows)

        return self.trainable(weights, offsets, batch.per_sample_weights, forward)

    def _move(self, weights: list[torch.Tensor]) -> None:
        self._has_moved = True
        move_to_huge_pages(weights)

    def _find_insert_pool(
        self, weights: list[torch.Tensor], ids: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None,
        ids_to_rows: IdsToRows, keep_rows: bool,
    ) -> LookedUp:  # fmt: skip
        training, tables = ids_to_rows.training, self._table_of_feature
        views = [view or self._no_index for view in ids_to_rows.find_views()]
        outputs, rows, absent = find_and_pool(ids, offsets, weights, tables, views, scale, keep_rows, self._unpooled)
        absent_per_table: list[int] = absent.tolist()
        if not training or not any(absent_per_table):
            ids_to_rows.answered(absent_per_table)
            return LookedUp(tuple(outputs), rows)
        was_absent = rows < 0
        ids_to_rows.insert(ids, rows, absent_per_table)
        pool_again_(outputs, rows, was_absent, offsets, weights, tables, scale, self._unpooled)
        return LookedUp(tuple(outputs), rows)
