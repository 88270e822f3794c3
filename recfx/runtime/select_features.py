"""``select_features``: puts the batch's keys into the collection's order, by name, and checks the batch.

Later nodes rely on what leaves this node: keys in output order (``feature@table`` if a feature reads several tables),
one batch size, offsets that ascend from 0 to the number of ids, 64-bit or 32-bit ids, weights only if the collection is
weighted, and ids in range for tables without an index.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import IdRangeError, InputError, MissingFeatureError, did_you_mean, type_of
from recfx.ir.tables import TableSpec
from recfx.runtime.bags import as_sent, expanded, permute_features, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.batch_checks import BatchChecks
from recfx.runtime.training_checks import refuse_replay


class InverseIndices:
    """The checks of one collection's inverse indices."""

    def __init__(self, collection: str, feature_names: list[str]) -> None:
        self.collection = collection
        # As in the standard collection, "feature@table" is a name for the feature.
        self._names = [name.split("@")[0] for name in feature_names]

    def of_features(
        self, named: tuple[list[str], torch.Tensor] | None, batch_sizes: list[int], features: KeyedJaggedTensor
    ) -> torch.Tensor:
        """The checked inverse indices of the collection's features.

        Args:
            named: names and ``[names, B]`` indices, as in ``KeyedJaggedTensor``. If it is None or has no indices, every
                feature's bags are the full batch.
            batch_sizes: the batch sizes of the features.
            features: the batch, whose device the result is on.

        Returns:
            int64 ``[F, B]``, each within the feature's own batch.

        Raises:
            InputError: ``bad_inverse_indices``; ``variable_batch_without_inverse_indices`` if features have different
                batch sizes; ``several_devices``.
        """
        device = features.values().device
        inverse = None if named is None else self._select(named)
        if inverse is None or inverse.numel() == 0:
            if len(set(batch_sizes)) > 1:
                self._refuse(
                    "features have different batch sizes, but there are no inverse indices to bring them together.",
                    "variable_batch_without_inverse_indices",
                    "pass inverse_indices= to the KeyedJaggedTensor, or one batch size for all features.",
                )
            return torch.arange(batch_sizes[0], device=device).expand(len(batch_sizes), -1)
        if device.type == "meta":
            return inverse.to(device)
        if inverse.is_meta:
            self._refuse(
                f"inverse_indices are on device meta, but ids on {device}.",
                "several_devices",
                "move the whole KeyedJaggedTensor to one device.",
            )
        limits = torch.tensor(batch_sizes, device=inverse.device).unsqueeze(1)
        wrong = torch.nonzero((inverse < 0) | (inverse >= limits))
        if wrong.numel():
            feature, sample = wrong[0].tolist()
            self._refuse(
                f"the inverse index {int(inverse[feature, sample])} of feature {self._names[feature]!r} is outside its "
                f"{batch_sizes[feature]} bags.",
                "bad_inverse_indices",
                _WHAT_TO_DO,
            )
        return inverse.to(device)

    def _select(self, named: tuple[list[str], torch.Tensor]) -> torch.Tensor:
        names, indices = named
        position_of = {name: position for position, name in enumerate(names)}
        missing = [name for name in self._names if name not in position_of]
        if missing:
            self._refuse(f"there are none for feature {missing[0]!r}, only for {list(names)}.")
        if (
            not isinstance(indices, torch.Tensor)
            or indices.layout != torch.strided
            or indices.dim() != 2
            or (indices.dtype not in (torch.int64, torch.int32) and indices.numel() > 0)
        ):
            form = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, torch.Tensor) else type_of(indices)
            self._refuse(f"they are {form}, but must be int64 or int32 [features, batch size].")
        rows = [position_of[name] for name in self._names]
        if max(rows) >= indices.shape[0]:
            self._refuse(f"there are {len(names)} names, but indices for {indices.shape[0]} features.")
        return indices.index_select(0, torch.tensor(rows, device=indices.device)).to(torch.int64)

    def _refuse(self, message: str, reason: str = "bad_inverse_indices", what_to_do: str = "") -> NoReturn:
        if reason == "bad_inverse_indices" and not what_to_do:
            message, what_to_do = f"inverse_indices do not fit the collection: {message}", _WHAT_TO_DO
        raise InputError(message, reason=reason, module_path=self.collection, what_to_do=what_to_do)


_WHAT_TO_DO = "pass inverse_indices=(names, indices), indices [features, B] of bags within each feature's own batch."


# Batches usually have one of a few orders of keys, each of which is computed once. The limit keeps memory bounded if
# every batch has a different order.
_MOST_ORDERS = 16


def _of_keys(features: KeyedJaggedTensor, positions: list[int], keys: list[str]) -> KeyedJaggedTensor:
    """The features at ``positions``, each with its own number of samples, under new names; without weights."""
    by_key = list(features.to_dict().values())
    chosen = [by_key[position] for position in positions]
    return KeyedJaggedTensor(
        keys,
        torch.cat([feature.values() for feature in chosen]),
        lengths=torch.cat([feature.lengths() for feature in chosen]),
        stride_per_key_per_rank=[[feature.lengths().numel()] for feature in chosen],
        length_per_key=[feature.values().numel() for feature in chosen],
    )


class _KeyOrder(NamedTuple):
    """How a batch's keys relate to the features of the collection."""

    positions: list[int]  # of the collection's features in the keys
    is_same: bool  # the keys are those features, in that order
    rows_per_key: torch.Tensor  # int64 [keys]: ids must be below this; -1 if any id is valid


class SelectFeatures(NodeModule):
    """Select, order and check the features of one collection."""

    def __init__(self, collection: str, tables: tuple[TableSpec, ...], is_weighted: bool) -> None:
        super().__init__()
        self.collection = collection
        self.tables = tables
        self.is_weighted = is_weighted
        self.feature_names = [feature for table in tables for feature in table.feature_names]
        self.keys = [name for table in tables for name in table.embedding_names]
        self._may_lose_rows = any(table.evicts or table.admits for table in tables)
        self._checks = BatchChecks(collection, is_weighted)
        self._inverse = InverseIndices(collection, self.feature_names)
        self._is_sent = self._converts = self._on_host = self._weights_are_sent = False
        self._expands = tables[0].is_pooled  # unsharded, TorchRec ignores inverse indices where it does not pool
        self._orders: dict[tuple[str, ...], _KeyOrder] = {}
        self.has_expanded = False  # whether any batch had different batch sizes per feature; for the report

    def prepare_to_send(self, world_size: int, on_host: bool) -> None:
        """Prepare for sending ids to other ranks: they are converted to one type, whatever type the batch has.

        Ranks that sent different types would misread each other. ``on_host``: ids are sent and hashed on the host.
        If rows are not pooled, the output has ids and lengths as they are, so they are converted when they are sent.
        """
        self._is_sent, self._converts, self._on_host, self._expands = True, self.tables[0].is_pooled, on_host, True
        self._weights_are_sent = self.is_weighted and world_size > 1

    def leave_on_device(self) -> None:
        """Leave it to a ``to_host`` node to copy ids that are sent on the host."""
        self._on_host = False

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Select from any KJT (or TensorDict) that holds the keys; returns ``[F]`` keys in the collection's order.

        Raises:
            MissingFeatureError: a key is absent.
            IdTypeError: ids are not integers, or are unsigned integers of more than 8 bits.
            IdRangeError: an id of a table without an index is not one of its rows.
            InputError: as in ``BatchChecks.checked`` and ``InverseIndices``; also if weights require a gradient, which
                other ranks do not send back, or if a batch on meta is to be sent; ``activation_checkpointing``.
        """
        if self._may_lose_rows and self.training:
            refuse_replay(self.collection)
        features = self._checks.as_keyed_jagged(features)
        order = self._order_of(features.keys())
        named_inverse = features.inverse_indices_or_none()
        checked = self._checks.checked(
            features, order.rows_per_key, lambda id_, key: self._out_of_range(id_, key, order)
        )
        if self._is_sent:
            self._check_sent(checked)
        if not self._expands and features.variable_stride_per_key():
            selected = _of_keys(checked, order.positions, self.keys)
        elif self._expands and (named_inverse is not None or features.variable_stride_per_key()):
            selected = self._expand(checked, order.positions, named_inverse)
        elif not order.is_same:
            selected = permute_features(checked, order.positions, self.keys)
        elif checked.keys() == self.keys:
            selected = checked
        else:
            selected = with_values(checked, checked.values(), checked.weights_or_none(), self.keys)
        return as_sent(selected, self._on_host) if self._converts else selected

    def _check_sent(self, checked: KeyedJaggedTensor) -> None:
        if checked.values().is_meta:
            raise InputError(
                "the batch is on meta, so it has no ids to send to other ranks.",
                reason="several_devices",
                module_path=self.collection,
                what_to_do="pass a batch with data; shapes alone are computed by the unsharded collection.",
            )
        if self._weights_are_sent and torch.is_grad_enabled() and checked.weights().requires_grad:
            raise InputError(
                "the batch's weights require a gradient, but other ranks do not send one back.",
                reason="weights_require_grad",
                module_path=self.collection,
                what_to_do="detach the weights if nothing behind them is trained; else leave the collection unsharded.",
            )

    def _order_of(self, keys: list[str]) -> _KeyOrder:
        cache_key = tuple(keys)
        order = self._orders.pop(cache_key, None)  # threads share them, so any may be gone
        if order is None:
            position_of = {key: position for position, key in enumerate(keys)}
            missing = [name for name in self.feature_names if name not in position_of]
            if missing:
                others = [key for key in keys if key not in self.feature_names]
                raise MissingFeatureError(
                    f"the batch lacks feature {missing[0]!r}{did_you_mean(missing[0], others, by=True)}"
                    + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                    + f"; it has {keys}.",
                    reason="missing_feature",
                    module_path=self.collection,
                    what_to_do="give the batch every feature of the collection, if need be as empty bags.",
                )
            positions = [position_of[name] for name in self.feature_names]
            rows = [-1] * len(keys)
            for position, limit in zip(positions, self._row_limits(), strict=True):
                if limit >= 0:  # a feature may read several tables
                    rows[position] = limit if rows[position] < 0 else min(rows[position], limit)
            rows_per_key = torch.tensor(rows, device="cpu")
            order = _KeyOrder(positions, positions == list(range(len(keys))), rows_per_key)
        self._orders[cache_key] = order
        if len(self._orders) > _MOST_ORDERS:
            for least_recently_used in list(self._orders)[:-_MOST_ORDERS]:
                self._orders.pop(least_recently_used, None)
        return order

    def _row_limits(self) -> list[int]:
        """Per feature, the number of rows of its table; -1 if an index takes any id."""
        return [table.row_limit for table in self.tables for _ in table.feature_names]

    def _expand(
        self, features: KeyedJaggedTensor, positions: list[int], named_inverse: tuple[list[str], torch.Tensor] | None
    ) -> KeyedJaggedTensor:
        batch_sizes = features.stride_per_key()
        inverse = self._inverse.of_features(named_inverse, [batch_sizes[position] for position in positions], features)
        self.has_expanded = True
        return expanded(features, positions, batch_sizes, inverse, self.keys)

    def _out_of_range(self, id_: int, key: int, order: _KeyOrder) -> IdRangeError:
        limits = self._row_limits()
        feature = next(
            feature
            for feature, position in enumerate(order.positions)
            if position == key and limits[feature] >= 0 and not 0 <= id_ < limits[feature]
        )
        table = next(table for table in self.tables if self.keys[feature] in table.embedding_names)
        if table.never_needs_index:
            return IdRangeError(
                f"id {id_} of feature {self.feature_names[feature]!r} is out of range for table {table.name!r}, whose "
                f"index was left out because its ids were declared to be {table.id_range}.",
                reason="id_out_of_range",
                module_path=self.collection,
                what_to_do="convert again, with id_ranges that hold, or without.",
            )
        return IdRangeError(
            f"id {id_} of feature {self.feature_names[feature]!r} is out of range for table "
            f"{table.name!r}, whose rows are 0 to {table.num_embeddings - 1}.",
            reason="id_out_of_range",
            module_path=self.collection,
            what_to_do="map ids below the table's rows; for raw ids convert with "
            "hashing=recfx.HashConfig.raw_ids(), or with rows= beyond the table's.",
        )
