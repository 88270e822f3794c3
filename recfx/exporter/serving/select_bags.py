"""``select_features`` of an exported graph: checks a batch, and puts its features into the collection's order."""

from typing import NamedTuple, Optional

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.exporter.serving.named_inputs import check_lengths, check_plain, check_types, check_weights
from recfx.ir.tables import TableSpec


class Bags(NamedTuple):
    """The ids (or rows) of one collection's features, in the collection's order. A row of -1 adds nothing to its bag,
    but counts in the bag's length. ``ends`` is there if the host knows where the features begin and end in ``values``;
    ``ids`` and ``lengths`` are as they came, if the output may need them.
    """

    values: torch.Tensor  # int64 [n]
    offsets: torch.Tensor  # int64 [F * B + 1]
    weights: Optional[torch.Tensor]  # noqa: UP045  float32 [n]; TorchScript does not compile `X | None` here
    ends: Optional[list[int]] = None  # noqa: UP045  [F + 1]
    ids: Optional[torch.Tensor] = None  # noqa: UP045  int32 or int64 [n]
    lengths: Optional[torch.Tensor] = None  # noqa: UP045  [F * B]


class ServedNode(nn.Module):
    """A module that a node of an exported graph calls."""


class SelectBags(ServedNode):
    """Take the features of one collection out of a batch, by name. What leaves it is safe for kernels that do not check
    anything: contiguous; lengths that are not negative and add up to the ids, and ids in range for tables without an
    index. A server's input is not to be trusted.
    """

    feature_names: list[str]
    table_names: list[str]
    first_limited: list[int]
    end_limited: list[int]
    least_limit: list[int]
    limits: torch.Tensor

    def __init__(self, collection: str, tables: tuple[TableSpec, ...], is_weighted: bool) -> None:
        super().__init__()
        self.collection = collection or "the collection"
        self.is_weighted = is_weighted
        self.feature_names = [feature for table in tables for feature in table.feature_names]
        self.table_names = [table.name for table in tables for _ in table.feature_names]
        limits = [table.row_limit for table in tables for _ in table.feature_names]
        self.register_buffer("limits", torch.tensor(limits))
        # Stretches of adjacent features without an index: where they begin and end, and the rows of the smallest table.
        self.first_limited = [i for i, limit in enumerate(limits) if limit >= 0 and (i == 0 or limits[i - 1] < 0)]
        self.end_limited = [
            i + 1 for i, limit in enumerate(limits) if limit >= 0 and (i + 1 == len(limits) or limits[i + 1] < 0)
        ]
        stretches = zip(self.first_limited, self.end_limited, strict=True)
        self.least_limit = [min(limits[first:end]) for first, end in stretches]

    def forward(self, features: KeyedJaggedTensor) -> Bags:
        """``features``: any KJT with at least the collection's features, in any order."""
        check_plain(self.collection, features)
        keys = features.keys()
        values, lengths = self.contiguous(features.values()), self.contiguous(features.lengths().reshape(-1))
        batch_size = self.batch_size(keys, values, lengths)
        weights = self.weights_of(features, values)
        if keys != self.feature_names:
            permute = torch.tensor(self.places(keys), dtype=torch.int32, device=values.device)
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(
                permute, lengths.view(len(keys), batch_size), values, weights, None
            )
            lengths = lengths.view(-1)
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.long())
        ids, values = values, values.long()
        for stretch in range(len(self.least_limit)):
            self.check_range(stretch, values, offsets, batch_size)
        return Bags(values, offsets, weights, None, ids, lengths)

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the kernels read it: they take no strides."""
        return tensor.contiguous()

    def batch_size(self, keys: list[str], values: torch.Tensor, lengths: torch.Tensor) -> int:
        """The number of samples of a batch that is well formed."""
        self.check_shapes(keys, values, lengths)
        check_lengths(self.collection, values, lengths)
        return lengths.numel() // len(keys)

    def check_shapes(self, keys: list[str], values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Refuse ids and lengths of other shapes or dtypes."""
        check_types(self.collection, values, lengths)
        if len(keys) == 0 or lengths.numel() % len(keys) != 0:
            raise RuntimeError(
                f"{self.collection}: {lengths.numel()} lengths do not fit {len(keys)} features [bad_lengths]"
            )

    def weights_of(self, features: KeyedJaggedTensor, values: torch.Tensor) -> torch.Tensor | None:
        """The weights of the ids, if the collection uses them."""
        weights = features.weights_or_none()
        if not self.is_weighted:
            return None
        if weights is None:
            raise RuntimeError(f"{self.collection}: the batch has no weights for its ids [missing_weights]")
        check_weights(self.collection, values, weights.reshape(-1))
        return self.contiguous(weights.reshape(-1).float())

    def places(self, keys: list[str]) -> list[int]:
        """Where the collection's features are among a batch's keys."""
        place: dict[str, int] = {}
        for number, key in enumerate(keys):  # of two equal keys, the later one counts, as in TorchRec's dicts
            place[key] = number
        positions: list[int] = []
        for name in self.feature_names:
            if name not in place:
                raise RuntimeError(
                    f"{self.collection}: the batch lacks feature {name}; it has {keys} [missing_feature]"
                )
            positions.append(place[name])
        return positions

    def check_range(self, stretch: int, values: torch.Tensor, offsets: torch.Tensor, batch_size: int) -> None:
        """Refuse ids that are not rows of a table without an index."""
        first, end = self.first_limited[stretch], self.end_limited[stretch]
        begin = int(offsets[first * batch_size])
        ids = values[begin : int(offsets[end * batch_size])]
        if ids.numel() == 0:
            return
        low, high = torch.aminmax(ids)
        if int(low) >= 0 and int(high) < self.least_limit[stretch]:
            return  # all ids are rows of the smallest table, so that nobody need ask which table each belongs to
        counts = offsets[first * batch_size : end * batch_size + 1 : max(batch_size, 1)].diff()
        limits = torch.repeat_interleave(self.limits[first:end], counts, output_size=ids.numel())
        is_wrong = (ids < 0) | (ids >= limits)
        if bool(is_wrong.any()):
            position = int(torch.nonzero(is_wrong)[0])
            feature = first + int((counts.cumsum(0) <= position).sum())
            name, table = self.feature_names[feature], self.table_names[feature]
            raise RuntimeError(
                f"{self.collection}: id {int(ids[position])} of feature {name} is out of range for table {table}, "
                f"whose rows are 0 to {int(self.limits[feature]) - 1} [id_out_of_range]"
            )
