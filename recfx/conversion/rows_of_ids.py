"""What ``unconvert`` says about ids: which rows they have in the plain model, and how a batch gets these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.errors import ConversionError, InputError, type_of
from recfx.hashing import ResolvedHashConfig

_Items = tuple[Tensor, Tensor]
_NONE, _BY_HASH = -1, -2


class _Reader(NamedTuple):
    """A table that reads a feature: its name in the mapping, ``""`` if it has no index; how many ids are their rows;
    and the row that ids without one read.
    """

    table: str
    dense_rows: int
    unseen: int


class RowsOfIds(dict[str, _Items]):
    """``{table: (ids, rows)}``, int64 ``[n]`` each, on the CPU, for every table of the converted model with an index.

    Example:
        >>> model = recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids())
        >>> output = model(batch)
        >>> plain, mapping = recfx.unconvert(model, with_mapping=True)
        >>> torch.equal(plain(mapping.to_rows(batch)), output)
        True

    Args:
        items: ids and rows, by path of the collection and table.
        collections: the converted collections, by path.
    """

    def __init__(self, items: Mapping[tuple[str, str], _Items], collections: Mapping[str, ConvertedCollection]) -> None:
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
                        _Reader(names.get((path, spec.name), ""), dense, unseen)
                    )

    def __reduce__(self) -> Any:
        return _restored, (dict(self), self._readers)

    def to_rows(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch as the plain model takes it: rows in the place of raw ids. Features of other tables stay.

        Ids without a row are left out of their bags and sequences, which become shorter; the converted model counts
        them in means, and has a row for each of them in a sequence. With ``unseen="row"`` and one bucket, they get the
        row that they read in eval mode.

        Example:
            >>> mapping = recfx.unconvert(recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids()), True)[1]
            >>> mapping.to_rows(batch).values()  # the model has seen no id yet
            tensor([], dtype=torch.int64)

        Raises:
            InputError: ``invalid_argument``: it is no batch.
            ConversionError: ``several_rows``: a feature is read by tables that have different rows for its ids.
                ``shared_rows_unknown``: an id has no row, and its hash would say which it reads (``unseen=``).
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise InputError(
                f"features is {type_of(features)}.",
                reason="invalid_argument",
                what_to_do="pass the KeyedJaggedTensor that the converted model takes.",
            )
        by_key = features.values().split(features.length_per_key())
        rows = torch.cat([features.values()[:0].long(), *map(self._rows, features.keys(), by_key)])
        kept, offsets, weights = rows >= 0, features.offsets(), features.weights_or_none()
        before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
        varies = features.variable_stride_per_key()
        return KeyedJaggedTensor(
            features.keys(),
            rows[kept],
            None if weights is None else weights[kept],
            lengths=before[offsets.long()].diff(),
            stride=None if varies else features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
            inverse_indices=features.inverse_indices_or_none(),
        )

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
        return answers[0]

    def _rows_in(self, reader: _Reader, ids: Tensor) -> Tensor:
        table, dense_rows, unseen = reader
        if table not in self._sorted:
            known, order = self[table][0].sort()
            self._sorted[table] = known, self[table][1][order]
        known, rows = (part.to(ids.device) for part in self._sorted[table])
        rows_of_ids = torch.where((ids >= 0) & (ids < dense_rows), ids, -1)
        if known.numel():
            place = torch.searchsorted(known, ids).clamp_(max=known.numel() - 1)
            rows_of_ids = torch.where(known[place] == ids, rows[place], rows_of_ids)
        absent = rows_of_ids < 0
        if unseen == _BY_HASH and bool(absent.any()):
            raise ConversionError(
                f"table {table!r} has no row for {int(absent.sum())} of these ids, and the index, which is gone, chose "
                "by their hash what they read.",
                reason="shared_rows_unknown",
                what_to_do="leave ids out that mapping does not have.",
            )
        return torch.where(absent, unseen, rows_of_ids)


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
