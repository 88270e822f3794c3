"""``select_features``: the batch's keys in the collection's order, by name; everything wrong with a batch is said here.

Later nodes rely on what leaves this node: keys in output order (``feature@table`` where a feature reads several
tables), one batch size, 64-bit ids, weights only where the collection is weighted, ids of adopted tables in range.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.errors import IdRangeError, IdTypeError, InputError, MissingFeatureError
from recfx.ir.tables import TableSpec
from recfx.kernels.id_range import first_out_of_range
from recfx.nodes.bags import as_sent, permute_features, select_bags, with_values
from recfx.nodes.base import NodeModule


class SelectFeatures(NodeModule):
    """Select, order and check the features of one collection.

    Args:
        collection: fully qualified name of the collection, for messages.
        tables: its tables, in order.
        is_weighted: whether the lookups use the batch's weights.
    """

    def __init__(self, collection: str, tables: tuple[TableSpec, ...], is_weighted: bool) -> None:
        super().__init__()
        self.collection = collection
        self.tables = tables
        self.is_weighted = is_weighted
        self.feature_names = [feature for table in tables for feature in table.feature_names]
        self.keys = [name for table in tables for name in table.embedding_names]
        # Beside an index no kernel checks ids: static tables are checked here then, as the standard collection does it.
        self._set_checks(everything=any(table.has_index for table in tables))
        self._is_sent = self._on_host = self._weights_are_sent = False
        self._positions: dict[tuple[str, ...], list[int]] = {}
        self.has_expanded = False  # a batch whose features had sizes of their own; for the report

    def _set_checks(self, *, everything: bool) -> None:
        self._checks_lengths = everything
        rows = [
            table.num_embeddings if everything and not table.has_index else table.checked_rows
            for table in self.tables
            for _ in table.feature_names
        ]
        self._checked_rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self._checks_range = any(limit >= 0 for limit in rows)

    def prepare_to_send(self, world_size: int, on_host: bool) -> None:
        """Check lengths, and ids of static tables, too: once ids have left for other ranks, an error stops all.

        What leaves has one type whatever the batch has: ranks that send other types than they get misread each other.

        Args:
            world_size: number of ranks.
            on_host: ids travel, and are hashed, on the host, whatever device the batch is on.
        """
        self._set_checks(everything=True)
        self._is_sent, self._on_host = True, on_host
        self._weights_are_sent = self.is_weighted and world_size > 1

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Select from any KJT (or TensorDict) that holds the keys; returns ``[F]`` keys in the collection's order.

        Raises:
            MissingFeatureError: a key is absent.
            IdTypeError: ids are not int32 or int64.
            InputError: weights are missing, or require a gradient that no other rank sends back; a variable batch
                comes without ``inverse_indices``; or lengths do not fit the ids.
            IdRangeError: an id of an adopted table is not one of its rows.
        """
        if not isinstance(features, KeyedJaggedTensor):
            features = self._as_keyed_jagged(features)
        self._check_values(features)
        positions = self._positions_of(features.keys())
        selected = self._select(features, positions)
        if self._checks_lengths:
            self._check_lengths(selected)
        if self._checks_range:
            self._check_range(selected)
        if not self._is_sent:
            return selected
        if self._on_host and selected.values().device.type != "cpu":
            selected = selected.to(torch.device("cpu"))
        return as_sent(selected)

    def _as_keyed_jagged(self, features: Any) -> KeyedJaggedTensor:
        if isinstance(features, TensorDict):
            return maybe_td_to_kjt(features, None)
        raise InputError(
            f"the batch is a {type(features).__name__}, not a KeyedJaggedTensor.",
            reason="not_a_keyed_jagged_tensor",
            module_path=self.collection,
            what_to_do="pass a torchrec.KeyedJaggedTensor, or a TensorDict of jagged tensors.",
        )

    def _check_values(self, features: KeyedJaggedTensor) -> None:
        dtype = features.values().dtype
        if dtype not in (torch.int64, torch.int32):
            raise IdTypeError(
                f"ids are {dtype}, but must be torch.int64 or torch.int32.",
                reason="wrong_id_dtype",
                module_path=self.collection,
                what_to_do="convert the KeyedJaggedTensor's values to int64 before the model.",
            )
        if self.is_weighted and features.weights_or_none() is None:
            raise InputError(
                "the collection is weighted, but the batch has no weights.",
                reason="missing_weights",
                module_path=self.collection,
                what_to_do="pass weights= to the KeyedJaggedTensor, or build the collection with is_weighted=False.",
            )
        if self._weights_are_sent and torch.is_grad_enabled() and features.weights().requires_grad:
            raise InputError(
                "the batch's weights require a gradient, and none comes back from other ranks.",
                reason="weights_require_grad",
                module_path=self.collection,
                what_to_do="detach the weights if nothing behind them is trained; else leave the collection unsharded.",
            )

    def _positions_of(self, keys: list[str]) -> list[int]:
        cache_key = tuple(keys)
        positions = self._positions.get(cache_key)
        if positions is None:
            position_of = {key: position for position, key in enumerate(keys)}
            missing = [name for name in self.feature_names if name not in position_of]
            if missing:
                raise MissingFeatureError(
                    f"the batch lacks feature {missing[0]!r}"
                    + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                    + f"; it has {keys}.",
                    reason="missing_feature",
                    module_path=self.collection,
                    what_to_do="give the batch every feature of the collection, if need be as empty bags.",
                )
            positions = [position_of[name] for name in self.feature_names]
            self._positions[cache_key] = positions
        return positions

    def _select(self, features: KeyedJaggedTensor, positions: list[int]) -> KeyedJaggedTensor:
        weights = features.weights_or_none() if self.is_weighted else None
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            return self._expand_variable_batch(features, positions, weights)
        if weights is not features.weights_or_none():
            features = with_values(features, features.values(), weights)
        if positions != list(range(len(features.keys()))):
            return permute_features(features, positions, self.keys)
        if features.keys() == self.keys:
            return features
        return with_values(features, features.values(), weights, self.keys)

    def _expand_variable_batch(
        self, features: KeyedJaggedTensor, positions: list[int], weights: torch.Tensor | None
    ) -> KeyedJaggedTensor:
        """Repeat each feature's bags to the full batch, as its inverse indices say."""
        inverse_indices = features.inverse_indices_or_none()
        if inverse_indices is None:
            raise InputError(
                "features have batch sizes of their own, but there are no inverse indices to bring them together.",
                reason="variable_batch_without_inverse_indices",
                module_path=self.collection,
                what_to_do="pass inverse_indices= to the KeyedJaggedTensor, or one batch size for all features.",
            )
        self.has_expanded = True
        inverse_position = {key: position for position, key in enumerate(inverse_indices[0])}
        strides = features.stride_per_key()
        starts = [0]
        for stride in strides:
            starts.append(starts[-1] + stride)
        device = features.values().device
        rows = torch.tensor([inverse_position[name] for name in self.feature_names], device=device)
        first_bag = torch.tensor([starts[position] for position in positions], device=device)
        inverse = inverse_indices[1].to(device).index_select(0, rows)
        bags = (inverse + first_bag.unsqueeze(1)).reshape(-1)
        values, lengths, offsets, weights = select_bags(features, bags, weights)
        return KeyedJaggedTensor(self.keys, values, weights, lengths=lengths, offsets=offsets, stride=inverse.size(1))

    def _check_lengths(self, selected: KeyedJaggedTensor) -> None:
        """Before ids get rows: a batch that no lookup can pool must not change an index."""
        lengths, ids = selected.lengths(), selected.values().numel()
        if lengths.is_meta or lengths.numel() == 0:
            return
        shortest, total = int(lengths.min()), int(lengths.sum())
        if shortest < 0 or total != ids:
            what = f"a bag has length {shortest}" if shortest < 0 else f"lengths add up to {total}"
            raise InputError(
                f"{what}, and there are {ids} ids.",
                reason="bad_lengths",
                module_path=self.collection,
                what_to_do="build the KeyedJaggedTensor with lengths that add up to its values.",
            )

    def _check_range(self, selected: KeyedJaggedTensor) -> None:
        values = selected.values()
        if values.is_meta or values.numel() == 0:
            return
        key_offsets = selected.offsets()[:: selected.stride()].to(torch.int64)
        position = first_out_of_range(values, key_offsets, self._checked_rows)
        if position < 0:
            return
        feature = int(torch.searchsorted(key_offsets.contiguous(), position, right=True)) - 1
        table = next(table for table in self.tables if self.keys[feature] in table.embedding_names)
        raise IdRangeError(
            f"id {int(values[position])} of feature {self.feature_names[feature]!r} is out of range for table "
            f"{table.name!r}, whose rows are 0 to {table.num_embeddings - 1}.",
            reason="id_out_of_range",
            module_path=self.collection,
            what_to_do="map ids below the table's rows; for raw ids convert with "
            "hashing=recfx.HashConfig(dense_rows=0), or with rows= beyond the table's.",
        )
