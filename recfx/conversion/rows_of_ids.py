"""What ``unconvert`` says about ids: which rows they have in the plain model, and how a batch gets these."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.errors import ConversionError, InputError, type_of
from recfx.hashing import ResolvedHashConfig
from recfx.models.nests import change_leaves
from recfx.models.reference_model import listed_rows
from recfx.runtime.bags import all_as_stored

_Items = tuple[Tensor, Tensor]
_Batch = TypeVar("_Batch")
_NONE, _BY_HASH = -1, -2


class _Reader(NamedTuple):
    """A table that reads a feature."""

    table: str  # its name in the mapping; empty if it has no index
    dense_rows: int  # how many ids are their rows
    unseen: int  # the row that ids without one read
    pooling: str = "SUM"  # as ``TableSpec`` has it


class RowsOfIds(dict[str, _Items]):
    """``{table: (ids, rows)}``, int64 ``[n]`` each, on the CPU, for every table of the converted model with an index.

    Example:
        >>> model = recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids())
        >>> output = model(batch)
        >>> plain, mapping = recfx.unconvert(model, with_mapping=True)
        >>> torch.equal(plain(mapping.to_rows(batch)), output)
        True
    """

    def __init__(self, items: Mapping[tuple[str, str], _Items], collections: Mapping[str, ConvertedCollection]) -> None:
        """Ids and rows by path of the collection and table, and the converted collections by path."""
        owners = Counter(table for _, table in items)
        names = {(path, table): table if owners[table] == 1 else f"{path}.{table}" for path, table in items}
        super().__init__({names[place]: ids_and_rows for place, ids_and_rows in items.items()})
        self._sorted: dict[str, _Items] = {}  # by id, of the tables that were asked for
        self._readers: dict[str, list[_Reader]] = {}  # by feature
        for path, collection in collections.items():
            for spec in collection.tables:
                dense, unseen = (0, _NONE) if spec.hashing is None else (spec.hashing.dense_rows, _unseen(spec.hashing))
                for feature in spec.feature_names:
                    self._readers.setdefault(feature, []).append(
                        _Reader(names.get((path, spec.name), ""), dense, unseen, spec.pooling)
                    )

    def __reduce__(self) -> Any:
        return _restored, (dict(self), self._readers)

    def to_rows(self, features: _Batch) -> _Batch:
        """The batch as the plain model takes it: rows in the place of raw ids. Features of other tables stay.

        With ``unseen="row"`` and one bucket, ids without a row of their own get the row that they read in eval mode.
        Otherwise, they are left out of sums, to which they add nothing. Of a sequence, where each id has its place,
        and of a mean, which counts them, they cannot be left out without another result: there, they are refused.

        Args:
            features: as the converted model takes them: a KJT, or a dict, list, tuple or dataclass with some, whose
                other parts stay.

        Example:
            >>> mapping = recfx.unconvert(recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids()), True)[1]
            >>> mapping.to_rows(batch).values()  # the model has seen no id yet
            tensor([], dtype=torch.int64)

        Raises:
            InputError: ``invalid_argument``: it is no batch.
            ConversionError: ``several_rows``: a feature is read by tables that have different rows for its ids.
                ``shared_rows_unknown``: an id has no row, and its hash would say which it reads (``unseen=``).
                ``id_without_row``: an id of a sequence or of a mean has no row.
        """
        mapped: list[KeyedJaggedTensor] = []

        def change(part: Any) -> Any:
            if not isinstance(part, KeyedJaggedTensor):
                return part
            mapped.append(part)
            return self._batch_of_rows(part)

        changed: _Batch = change_leaves(features, change)
        if not mapped:
            raise InputError(
                f"features is {type_of(features)}, without a KeyedJaggedTensor.",
                reason="invalid_argument",
                what_to_do="pass the KeyedJaggedTensor that the converted model takes, or the batch that it is in.",
            )
        return changed

    def _batch_of_rows(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        features = all_as_stored(features)  # TorchRec adds up lengths, and torch indexes, by what is stored
        by_key = features.values().split(features.length_per_key())
        rows_of_keys = [self._rows(feature, ids) for feature, ids in zip(features.keys(), by_key, strict=True)]
        rows = torch.cat([features.values()[:0].long(), *rows_of_keys])
        kept, offsets, weights = rows >= 0, features.offsets(), features.weights_or_none()
        before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
        varies = features.variable_stride_per_key()
        return KeyedJaggedTensor(
            features.keys(), rows[kept], None if weights is None else weights[kept],
            lengths=before[offsets.long()].diff(), stride=None if varies else features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
            inverse_indices=features.inverse_indices_or_none(),
        )  # fmt: skip

    def _rows(self, feature: str, ids: Tensor) -> Tensor:
        """int64 ``[n]``, -1 for an id without a row."""
        readers = self._readers.get(feature, [])
        if not any(reader.table for reader in readers):
            return ids.long()
        answers = [self._rows_in(reader, ids.long()) if reader.table else ids.long() for reader in readers]
        if not all(torch.equal(rows, answers[0]) for rows in answers):
            raise ConversionError(
                f"feature {feature!r} is read by {len(answers)} tables, which have different rows for its ids.",
                reason="several_rows",
                what_to_do="give each table a feature of its own, a copy of this one, and map each by its table.",
            )
        missing = int((answers[0] < 0).sum())
        poolings = {reader.pooling for reader in readers} - {"SUM"}
        if missing and poolings:
            of_sequence, of_mean = "each has its place in a sequence", "the converted model's mean counts them"
            raise ConversionError(
                f"{missing} of {ids.numel()} ids of feature {feature!r} have no row, and "
                f"{of_sequence if 'NONE' in poolings else of_mean}.",
                reason="id_without_row",
                what_to_do="leave them out of the batch, or convert with unseen='row', which keeps a row for them.",
            )
        return answers[0]

    def _rows_in(self, reader: _Reader, ids: Tensor) -> Tensor:
        table, dense_rows, unseen, _ = reader
        if table not in self._sorted:
            known, order = self[table][0].sort()
            self._sorted[table] = known, self[table][1][order]
        rows_of_ids = listed_rows(ids, *self._sorted[table], dense_rows)
        missing = rows_of_ids < 0
        if unseen == _BY_HASH and bool(missing.any()):
            raise ConversionError(
                f"table {table!r} has no row for {int(missing.sum())} of these ids, and the index, which is gone, "
                "chose by their hash what they read.",
                reason="shared_rows_unknown",
                what_to_do="leave ids out that mapping does not have.",
            )
        return torch.where(missing, unseen, rows_of_ids)


def _unseen(hashing: ResolvedHashConfig) -> int:
    """The row that an id without one reads in eval mode."""
    if hashing.unseen == "zeros":
        return _NONE
    return hashing.rows - 1 if hashing.unseen == "row" and hashing.buckets == 1 else _BY_HASH


def _restored(items: dict[str, _Items], readers: dict[str, list[_Reader]]) -> RowsOfIds:
    mapping = RowsOfIds({}, {})
    mapping.update(items)
    mapping._readers = readers
    return mapping


torch.serialization.add_safe_globals([_restored, _Reader])  # torch.load reads a mapping where this module is imported
