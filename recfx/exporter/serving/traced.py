"""Nodes of an exported graph that ``torch.export`` can trace: no Python in them depends on what a batch holds.
Assertions in the graph find what is wrong with it, and cannot name the id or the length that they found.
"""

import fbgemm_gpu  # noqa: F401  registers the operators
import torch

from recfx.exporter.serving.find_rows import FindFrozenRows
from recfx.exporter.serving.select_bags import Bags, SelectBags
from recfx.ir.tables import TableSpec

_MOST = 2**63 - 1
_FIND = "fbgemm::pruned_hashmap_lookup"

if not torch._C._dispatch_has_kernel_for_dispatch_key(_FIND, "Meta"):

    @torch.library.impl(_FIND, "Meta")
    def _rows_of(ids: torch.Tensor, offsets: torch.Tensor, table: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ids)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies at every call. The tensors of a trace are contiguous, so that it would leave ``contiguous`` out."""
    return tensor.clone(memory_format=torch.contiguous_format)


class TracedSelectBags(SelectBags):
    """``SelectBags`` with assertions in the graph in the place of branches."""

    least: torch.Tensor
    most: torch.Tensor

    def __init__(self, collection: str, tables: tuple[TableSpec, ...], is_weighted: bool) -> None:
        super().__init__(collection, tables, is_weighted)
        limits: list[int] = self.limits.tolist()
        self.limited = [(number, limit) for number, limit in enumerate(limits) if limit >= 0]
        self.register_buffer("most", torch.tensor([limit - 1 if limit >= 0 else _MOST for limit in limits]))
        self.register_buffer("least", torch.tensor([0 if limit >= 0 else -_MOST - 1 for limit in limits]))

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy."""
        return contiguous_copy(tensor)

    def batch_size(self, keys: list[str], values: torch.Tensor, lengths: torch.Tensor) -> int:
        """The number of samples; what is wrong with the batch's values is found when the graph runs."""
        torch._assert_async(
            ((lengths >= 0) & (lengths <= values.numel())).all(),
            f"{self.collection}: a length is negative, or greater than the number of ids [bad_lengths]",
        )
        torch._assert_async(
            lengths.sum() == values.numel(),
            f"{self.collection}: the lengths do not add up to the number of ids [bad_lengths]",
        )
        return lengths.numel() // len(keys)

    def check_range(self, stretch: int, values: torch.Tensor, offsets: torch.Tensor, batch_size: int) -> None:
        """Refuse ids that are not rows of a table without an index; the first stretch checks those of all."""
        if stretch > 0:
            return
        borders = offsets.index_select(0, torch.arange(len(self.feature_names) + 1) * batch_size)
        feature = torch.bucketize(torch.arange(values.numel()), borders[1:-1], right=True)
        is_wrong = (values < self.least.index_select(0, feature)) | (values > self.most.index_select(0, feature))
        wrong = torch.ops.fbgemm.asynchronous_complete_cumsum(is_wrong.long()).index_select(0, borders).diff()
        for number, limit in self.limited:
            torch._assert_async(
                wrong[number] == 0,
                f"{self.collection}: an id of feature {self.feature_names[number]} is out of range for table "
                f"{self.table_names[number]}, whose rows are 0 to {limit - 1} [id_out_of_range]",
            )


class TracedFindRows(FindFrozenRows):
    """``FindFrozenRows`` that completes every id's answer for every table, and keeps it if the id is the table's."""

    def forward(self, bags: Bags) -> Bags:
        """``bags``: ids. Returns rows in the same bags, -1 for ids without one."""
        batch_size = (bags.offsets.numel() - 1) // self.num_features
        borders = bags.offsets.index_select(0, self.first_feature * batch_size)
        ids = bags.values
        rows = torch.ops.fbgemm.pruned_hashmap_lookup(ids, borders, self.slots, self.slot_borders)
        position = torch.arange(ids.numel())
        for table in self.completed:
            is_inside = (position >= borders[table.table]) & (position < borders[table.table + 1])
            rows = torch.where(is_inside, self.complete(table, ids, rows), rows)
        return Bags(rows, bags.offsets, bags.weights)
