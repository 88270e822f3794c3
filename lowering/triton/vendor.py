"""Target ``npu[vendor]``: the forward by operators of torch_npu, table by table, with target ``npu``'s backward.

By CANN's sources, ``index_select`` and ``embedding_bag`` run on AI Cores, ``embedding_bag`` in one order whatever the
timing, and the host waits for neither; but a lookup of several tables has to know on the host how many ids each has.
``embedding_bag`` sums in the dtype of the table, and knows no ids without a row: where that matters, rows are copied
first, as float32, and summed from there. fbgemm_ascend's pooled forward, which adds by atomics as far as is known, is
not used.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.kernels.lookup.embedding_bag import embedding_bag
from recfx.kernels.lookup.pooled_lookup import pooled_like
from recfx.lowering.registry import LookupKernel, LookupSpec, Outputs
from recfx.lowering.triton import target

is_here = target.is_here
_MOST_ROWS = 2**31 - 1  # CANN's embedding_bag casts them to int32


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None if the operators serve the lookup, and the kernels of the backward fit the NPU of this name."""
    return unserved(lookup) or target.serves(lookup, chip)


def unserved(lookup: LookupFacts) -> Diagnostic | None:
    """Why the vendor's operators do not compute what the kernels in Triton do."""
    if lookup.combine == NOT_COMBINED or all(table.rows <= _MOST_ROWS for table in lookup.facts):
        return None
    return Diagnostic("too_many_rows", "", f"the vendor's embedding_bag numbers rows up to {_MOST_ROWS}.")


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel of one lookup."""
    return target.build_with(spec, partial(look_up, may_be_absent=any(table.has_index for table in spec.tables)))


def look_up(
    rows: Tensor, offsets: Tensor, lengths: Sequence[int], weights: list[Tensor], table_of_feature: list[int],
    mean: bool, scale: Tensor | None, unpooled: bool, may_be_absent: bool = False,
) -> Outputs:  # fmt: skip
    """The outputs of ``kernels/lookup/pooled_lookup.py``; if ``unpooled``, those of each feature.

    Args:
        lengths: how many ids each feature has; if empty, and several tables are pooled, the host waits for ``offsets``.
        may_be_absent: whether rows may be -1.
    """
    given = _Rows(rows, may_be_absent)
    if unpooled:
        of_features = zip(table_of_feature, pairwise(accumulate(lengths, initial=0)), strict=True)
        return tuple(given.read(weights[table], slice(*ids)) for table, ids in of_features)
    if rows.numel() == 0:  # of no ids at all, CANN leaves the sums as they were in memory
        return (pooled_like(offsets, weights, table_of_feature).zero_(),)
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    features = [(table, len(list(of_table))) for table, of_table in groupby(table_of_feature)]
    borders = [0, *[0] * (len(table_of_feature) - 1), rows.numel()]
    if len(features) > 1:
        borders = list(accumulate(lengths, initial=0)) if lengths else offsets[::batch_size].tolist()
    pooled, first = [], 0
    for table, count in features:
        begin, end = borders[first], borders[first + count]
        bags = offsets[first * batch_size : (first + count) * batch_size + 1] - begin
        of_ids = None if scale is None else scale[begin:end]
        sums = given.pool(weights[table], slice(begin, end), bags, "MEAN" if mean else "SUM", of_ids)
        # From the bags of one feature after those of another to a sample's bags beside each other.
        pooled.append(sums.view(count, batch_size, -1).transpose(0, 1).reshape(batch_size, -1))
        first += count
    return (torch.cat(pooled, dim=1),)


class _Rows:
    """The rows of a batch, of which each table has those of some ids."""

    def __init__(self, rows: Tensor, may_be_absent: bool) -> None:
        self.rows = rows.clamp(min=0) if may_be_absent else rows
        self.absent = (rows < 0).unsqueeze(1) if may_be_absent else None

    @cached_property
    def nothing(self) -> Tensor:
        return self.rows.new_zeros((), dtype=torch.float32)

    @cached_property
    def places(self) -> Tensor:
        return torch.arange(self.rows.numel(), device=self.rows.device)

    def read(self, weight: Tensor, ids: slice) -> Tensor:
        """Rows, float32 ``[n, dim]``."""
        rows = weight.index_select(0, self.rows[ids]).float()
        return rows if self.absent is None else torch.where(self.absent[ids], self.nothing, rows)

    def pool(self, weight: Tensor, ids: slice, bags: Tensor, combine: str, scale: Tensor | None) -> Tensor:
        """Sums or means of the bags that begin at ``bags``, float32 ``[bags, dim]``."""
        if ids.start == ids.stop:
            return weight.new_zeros(bags.numel() - 1, weight.shape[1], dtype=torch.float32)
        if self.absent is None and weight.dtype == torch.float32:
            return embedding_bag(weight, self.rows[ids], bags, combine, scale)
        return embedding_bag(self.read(weight, ids), self.places[: ids.stop - ids.start], bags, combine, scale)
