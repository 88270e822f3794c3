"""Nodes of an exported graph in ATen alone, for devices where FBGEMM's operators are not. The host waits for the device
once per batch, to check it; where the ids of each feature are, which it learns then, goes from node to node.
"""

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.exporter.serving.find_rows import Completed, FindFrozenRows
from recfx.exporter.serving.named_inputs import check_plain, check_sums
from recfx.exporter.serving.pool_rows import FORMATS, PoolRows
from recfx.exporter.serving.select_bags import Bags, SelectBags, ServedNode
from recfx.ir.context import FrozenIndex
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.tables import TableSpec
from recfx.kernels.index.slot_table import home_slots
from recfx.kernels.route.from_zero import from_zero


def reordered(values: torch.Tensor, counts: list[int], positions: list[int]) -> torch.Tensor:
    """The values of the features at these positions, each of which has as many as ``counts`` says. Scriptable."""
    parts = values.split(counts)
    return torch.cat([parts[position] for position in positions])


class AtenSelectBags(SelectBags):
    """``SelectBags`` without FBGEMM."""

    limit_of_feature: list[int]

    def __init__(self, collection: str, tables: tuple[TableSpec, ...], is_weighted: bool) -> None:
        super().__init__(collection, tables, is_weighted)
        self.limit_of_feature = self.limits.tolist()

    def forward(self, features: KeyedJaggedTensor) -> Bags:
        """``features``: any KJT with at least the collection's features, in any order."""
        check_plain(self.collection, features)
        keys = features.keys()
        values, lengths = self.contiguous(features.values()), self.contiguous(features.lengths().reshape(-1))
        self.check_shapes(keys, values, lengths)
        id_type, length_type = values.dtype, lengths.dtype
        values, lengths = values.long(), lengths.long()
        counts = self.checked_counts(keys, values, lengths)
        weights = self.weights_of(features, values)
        batch_size = lengths.numel() // len(keys)
        positions = self.places(keys)
        ends = [0]
        for position in positions:
            ends.append(ends[-1] + counts[position])
        if keys != self.feature_names:
            place = torch.tensor(positions, device=lengths.device)
            lengths = lengths.view(len(keys), batch_size).index_select(0, place).view(-1)
            values = reordered(values, counts, positions)
            weights = None if weights is None else reordered(weights, counts, positions)
        offsets = from_zero(lengths, ends[-1])
        return Bags(values, offsets, weights, ends, values.to(id_type), lengths.to(length_type))

    def checked_counts(self, keys: list[str], values: torch.Tensor, lengths: torch.Tensor) -> list[int]:
        """How many ids each key has. The one place where the host waits for the device."""
        limits = [-1 for _ in keys]  # of ids of each key: the rows of the smallest table that reads them as rows
        for limit, place in zip(self.limit_of_feature, self.places(keys)):  # noqa: B905  TorchScript
            if limit >= 0 and (limits[place] < 0 or limit < limits[place]):
                limits[place] = limit
        ids, device = values.numel(), values.device
        if lengths.numel() == 0:
            counts, least, most, wrong = [0 for _ in keys], 0, 0, [0 for _ in keys]
        else:
            per_key = lengths.view(len(keys), -1).sum(1)
            borders = from_zero(per_key.clamp(0, ids), len(keys) * ids).clamp(max=ids)
            borders[-1] = ids  # lengths may be wrong
            most_of_id = torch.repeat_interleave(torch.tensor(limits, device=device), borders.diff(), output_size=ids)
            is_wrong = (most_of_id >= 0) & ((values < 0) | (values >= most_of_id))
            of_key = from_zero(is_wrong, ids).index_select(0, borders).diff()
            range_of = torch.stack([lengths.amin(), lengths.amax()])
            facts: list[int] = torch.cat([range_of, per_key, of_key]).tolist()
            least, most = facts[0], facts[1]
            counts, wrong = facts[2 : 2 + len(keys)], facts[2 + len(keys) :]
        check_sums(self.collection, least, most, sum(counts), ids)
        for number, name in enumerate(keys):
            if wrong[number] > 0:
                raise RuntimeError(
                    f"{self.collection}: {wrong[number]} ids of feature {name} are out of range for a table of "
                    f"{limits[number]} rows [id_out_of_range]"
                )
        return counts


class AtenFindRows(FindFrozenRows):
    """``FindFrozenRows`` without FBGEMM: as many steps as finding any id of the table takes, without waiting."""

    index_attributes = ("completed", "longest")
    # As in the base class: TorchScript does not read the annotations of base classes.
    completed: list[Completed]
    table_ends: list[int]
    slots_before: list[int]
    longest: list[int]

    def __init__(self, tables: tuple[TableSpec, ...], indexes: dict[str, FrozenIndex]) -> None:
        super().__init__(tables, indexes)
        self.table_ends = self.first_feature.tolist()
        self.slots_before = self.slot_borders.tolist()
        self.longest = [indexes[table.name].longest_probe if table.has_index else 0 for table in tables]

    def forward(self, bags: Bags) -> Bags:
        """``bags``: ids. Returns rows in the same bags, -1 for ids without one."""
        ends = bags.ends
        assert ends is not None
        parts: list[torch.Tensor] = []
        for table, steps in enumerate(self.longest):
            ids = bags.values[ends[self.table_ends[table]] : ends[self.table_ends[table + 1]]]
            first, end = self.slots_before[table], self.slots_before[table + 1]
            rows = ids if first == end else self.find(ids, self.slots[first:end], steps)
            for completed in self.completed:
                if completed.table == table:
                    rows = self.complete(completed, ids, rows)
            parts.append(rows)
        return Bags(torch.cat(parts), bags.offsets, bags.weights, ends)

    def find(self, ids: torch.Tensor, slots: torch.Tensor, steps: int) -> torch.Tensor:
        """The row of each id of one table, -1 if it has none."""
        position = home_slots(ids, slots.size(0))
        rows = torch.full_like(ids, -1)
        for _ in range(steps):
            here = slots.index_select(0, position)
            rows = torch.where(here[:, 0] == ids, here[:, 1], rows)
            position = (position + 1) & (slots.size(0) - 1)
        return rows


class StoredRows(ServedNode):
    """The lookup of one table. TorchScript cannot look at bytes as floats, so each table has its own tensor."""

    positions: list[int]
    rows: torch.Tensor
    powers: torch.Tensor

    def __init__(self, table: TableSpec, positions: list[int], combine: str, is_weighted: bool) -> None:
        super().__init__()
        self.positions, self.is_weighted = positions, is_weighted
        self.is_pooled, self.is_mean = combine != NOT_COMBINED, combine == "MEAN"
        form = FORMATS[table.dtype]
        self.bits, self.is_quantized, self.dim = form.bits, form.is_quantized, table.embedding_dim
        dtype = torch.uint8 if form.is_quantized else table.dtype
        columns = form.bytes(table.embedding_dim) if form.is_quantized else table.embedding_dim
        self.register_buffer("rows", torch.empty(table.num_embeddings, columns, dtype=dtype))
        self.register_buffer("powers", torch.tensor([2.0 ** (max(exponent, 1) - 25) for exponent in range(32)]))

    def forward(self, bags: Bags, lengths: torch.Tensor) -> torch.Tensor:
        """``bags``: rows of every table; ``lengths``: int64 ``[F, B]``. Returns ``[B, columns]``, or ``[n, dim]``."""
        ends, weights, pooled = bags.ends, bags.weights, torch.jit.annotate(list[torch.Tensor], [])
        assert ends is not None
        samples = torch.arange(lengths.size(1), device=lengths.device)
        for position in self.positions:
            begin, end = ends[position], ends[position + 1]
            rows = bags.values[begin:end]
            looked_up = self.gathered(rows.clamp(min=0))
            looked_up = torch.where((rows >= 0).unsqueeze(1), looked_up, torch.zeros_like(looked_up))
            if not self.is_pooled:
                pooled.append(looked_up)
                continue
            if self.is_weighted and weights is not None:
                looked_up = looked_up * weights[begin:end].unsqueeze(1)
            bag = torch.repeat_interleave(samples, lengths[position], output_size=end - begin)
            sums = looked_up.new_zeros([lengths.size(1), self.dim]).index_add(0, bag, looked_up)
            pooled.append(sums / lengths[position].clamp(min=1).unsqueeze(1) if self.is_mean else sums)
        return torch.cat(pooled, dim=1 if self.is_pooled else 0)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows``: int64 ``[n]``. Returns float32 ``[n, dim]``."""
        stored = self.rows.index_select(0, rows)
        if not self.is_quantized:
            return stored.float()
        codes = stored[:, 4:].float()
        if self.bits == 4:
            both = stored[:, 4:].int()
            codes = torch.stack([(both & 15).float(), (both & 240).float() * 0.0625], dim=2).flatten(1)[:, : self.dim]
        return codes * self.float16_at(stored, 0) + self.float16_at(stored, 2)

    def float16_at(self, stored: torch.Tensor, at: int) -> torch.Tensor:
        """The float16 at a byte of each row, float32 ``[n, 1]``: finite in tables of finite rows."""
        low, high = stored[:, at].long(), stored[:, at + 1].long()
        exponent, mantissa = ((high & 124).float() * 0.25).long(), low + (high & 3) * 256
        size = (mantissa + (exponent > 0).long() * 1024).float() * self.powers.index_select(0, exponent)
        return torch.where(high >= 128, -size, size).unsqueeze(1)


class AtenPoolRows(PoolRows):
    """``PoolRows`` without FBGEMM: feature by feature, rows become floats after they were gathered."""

    kernel = "aten"

    def __init__(
        self, tables: tuple[TableSpec, ...], combine: str, features: tuple[str, ...], is_weighted: bool
    ) -> None:
        super().__init__(tables, combine, features, is_weighted)
        self.rows = torch.empty(0, dtype=torch.uint8)
        place = {name: number for number, name in enumerate(features)}
        positions = [[place[name] for name in table.embedding_names] for table in tables]
        self.stored = nn.ModuleList(
            StoredRows(table, of_table, combine, is_weighted) for table, of_table in zip(tables, positions, strict=True)
        )

    def parts(self) -> list[tuple[torch.Tensor, tuple[TableSpec, ...]]]:
        return [(self.stored.get_buffer(f"{number}.rows"), (spec,)) for number, spec in enumerate(self.specs)]

    def forward(self, bags: Bags) -> torch.Tensor:
        """``bags``: rows of every table of the collection. Returns ``[B, sum D]``, or ``[n, D]`` if not combined."""
        batch_size = (bags.offsets.numel() - 1) // self.num_features
        lengths = bags.offsets.diff().view(self.num_features, batch_size)
        pooled: list[torch.Tensor] = []
        for stored in self.stored:
            pooled.append(stored(bags, lengths))
        return torch.cat(pooled, dim=1 if self.is_pooled else 0).to(self.output_dtype)
