"""What follows the lookups of an exported graph: ``mean_divide``, and TorchRec's outputs: ``keyed_tensor``, and
``jagged_dict`` where rows are not pooled.
"""

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recfx.exporter.serving.select_bags import Bags, ServedNode
from recfx.ir.tables import Columns, TableSpec


class AssembleColumns(ServedNode):
    """Concatenate pooled parts, put their columns into the standard collection's order, and name them."""

    order: torch.Tensor

    def __init__(self, keys: list[str], dims: list[int], parts: list[list[Columns]]) -> None:
        super().__init__()
        self.keys = keys
        self.dims = dims
        begins, begin = {}, 0
        for columns in (columns for part in parts for columns in part):
            begins[columns.key] = begin
            begin += columns.dim
        order = [begins[key] + column for key, dim in zip(keys, dims, strict=True) for column in range(dim)]
        self.is_ordered = order == list(range(len(order)))
        self.register_buffer("order", torch.tensor(order))

    def forward(self, pooled: list[torch.Tensor]) -> KeyedTensor:
        """``pooled``: one ``[B, sum D]`` tensor per input. Returns the ``[B, D]`` keyed tensor."""
        values = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        if not self.is_ordered:
            values = values.index_select(1, self.order)
        return KeyedTensor(self.keys, self.dims, values)


class DivideMeans(ServedNode):
    """Divide the columns of the ``divided`` tables' features by ``max(length, 1)``; ids without a row count in the
    length. ``features`` are the output keys of the whole collection.
    """

    def __init__(self, tables: tuple[TableSpec, ...], divided: tuple[str, ...], features: tuple[str, ...]) -> None:
        super().__init__()
        self.divided = list(divided)
        self.num_features = len(features)
        place = {name: number for number, name in enumerate(features)}
        self.widths = [table.embedding_dim for table in tables for _ in table.embedding_names]
        self.positions = [
            place[name] if table.name in divided else -1 for table in tables for name in table.embedding_names
        ]

    def forward(self, pooled: torch.Tensor, bags: Bags) -> torch.Tensor:
        """``pooled``: ``[B, sum D]``; ``bags``: the collection's ids or rows. Returns ``[B, sum D]``."""
        batch_size = (bags.offsets.numel() - 1) // self.num_features
        lengths = bags.offsets.diff().view(self.num_features, batch_size)
        divisors = lengths.clamp(min=1).to(pooled.dtype)
        parts: list[torch.Tensor] = []
        for part, position in zip(pooled.split(self.widths, dim=1), self.positions):  # noqa: B905  TorchScript
            parts.append(part if position < 0 else part / divisors[position].unsqueeze(1))
        return torch.cat(parts, dim=1)


class AssembleJagged(ServedNode):
    """Give each key its rows, with the lengths of its feature, and its ids if ``need_indices``; ``parts`` has the keys
    whose rows each input has.
    """

    keys: list[str]
    parts: list[list[int]]

    def __init__(self, keys: list[str], parts: list[list[str]], need_indices: bool) -> None:
        super().__init__()
        self.keys, self.need_indices = keys, need_indices
        self.parts = [[keys.index(key) for key in part] for part in parts]

    def forward(self, rows: list[torch.Tensor], bags: Bags) -> dict[str, JaggedTensor]:
        """``rows``: one ``[n, D]`` tensor per input; ``bags``: the collection's ids.

        Returns a ``JaggedTensor`` per key: ``[n, D]`` rows, a row per id; ids as weights if they are needed.
        """
        ids, lengths = bags.ids, bags.lengths
        assert ids is not None
        assert lengths is not None
        lengths = lengths.view(len(self.keys), lengths.numel() // len(self.keys))
        of_rows, of_ids = [rows[0]], [ids]
        if len(self.keys) > 1:
            counts = self.counts(bags.ends, lengths)
            of_rows, of_ids = [rows[0] for _ in self.keys], list(ids.split(counts))
            for positions, part in zip(self.parts, rows):  # noqa: B905  TorchScript
                pieces = part.split([counts[position] for position in positions])
                for position, piece in zip(positions, pieces):  # noqa: B905
                    of_rows[position] = piece
        output: dict[str, JaggedTensor] = {}
        for number, key in enumerate(self.keys):
            output[key] = JaggedTensor(of_rows[number], of_ids[number] if self.need_indices else None, lengths[number])
        return output

    def counts(self, ends: list[int] | None, lengths: torch.Tensor) -> list[int]:
        """How many ids each key has."""
        if ends is not None:
            return [ends[number + 1] - ends[number] for number in range(len(self.keys))]
        counted: list[int] = lengths.sum(1).tolist()
        return counted
