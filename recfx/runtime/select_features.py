"""``select_features``: puts the batch's keys into the collection's order, by name, and checks the batch.

Later nodes rely on what leaves this node: keys in output order (``feature@table`` if a feature reads several tables),
one batch size, offsets that ascend from 0 to the number of ids, 64-bit or 32-bit ids, weights only if the collection is
weighted, and ids in range for tables without an index.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.errors import IdRangeError, IdTypeError, InputError, MissingFeatureError, did_you_mean, type_of
from recfx.ir.tables import TableSpec
from recfx.kernels.lookup.bag_offsets import OUT_OF_RANGE, Fault, bag_offsets
from recfx.runtime.bags import as_sent, as_stored, expanded, permute_features, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.in_flight import refuse_replay

_IDS = (torch.int64, torch.int32)
_SMALL_IDS = (torch.int16, torch.int8, torch.uint8, torch.bool)  # the standard collection accepts these as well
_LENGTHS = (torch.int64, torch.int32)
_SMALL_LENGTHS = (torch.int16, torch.int8, torch.uint8)
_WEIGHTS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_FIT_LENGTHS = "build the KeyedJaggedTensor with lengths (or offsets) of all its bags, which add up to its values."


class BatchChecks:
    """The checks of one collection's batches."""

    def __init__(self, collection: str, is_weighted: bool) -> None:
        self.collection = collection
        self.is_weighted = is_weighted

    def as_keyed_jagged(self, features: Any) -> KeyedJaggedTensor:
        """The batch as a KJT.

        Raises:
            InputError: ``not_a_keyed_jagged_tensor``.
        """
        if isinstance(features, KeyedJaggedTensor):
            return features
        problem = f"the batch is {type_of(features)}, not a KeyedJaggedTensor."
        if isinstance(features, TensorDict):
            try:
                return maybe_td_to_kjt(features, None)
            except (AttributeError, TypeError, RuntimeError, AssertionError) as error:
                problem = f"the TensorDict is not a batch of jagged tensors ({type(error).__name__}: {error})."
        raise InputError(
            problem,
            reason="not_a_keyed_jagged_tensor",
            module_path=self.collection,
            what_to_do="pass a torchrec.KeyedJaggedTensor, or a TensorDict of jagged tensors.",
        )

    def checked(
        self, features: KeyedJaggedTensor, rows_per_key: torch.Tensor, out_of_range: Callable[[int, int], IdRangeError]
    ) -> KeyedJaggedTensor:
        """Check a batch and return it in the form that later nodes rely on.

        Args:
            features: a KJT with at least one key.
            rows_per_key: int64 ``[keys]``, on the CPU: the ids of each key must be below this; -1: any id is valid.
            out_of_range: makes the error for an id, given as the id and the position of its key.

        Returns:
            A KJT of contiguous tensors, none a negated view: int32 or int64 ids; int32 or int64 lengths (``[bags]``) or
            none; int64 offsets from 0 to the number of ids; weights only if the collection is weighted; one batch size,
            or a batch size per key. On meta, only sizes are checked, because nothing can be read.

        Raises:
            IdTypeError: ``wrong_id_dtype``.
            IdRangeError: ``id_out_of_range``.
            InputError: ``bad_ids``, ``bad_lengths``, ``bad_batch_sizes``, ``bad_weights``, ``missing_weights``,
                ``several_devices``.
        """
        values = self._ids(features)
        weights = self._weights(features, values)
        bags, are_offsets = self._bags(features, values)
        keys = features.keys()
        per_key = self._bags_per_key(features, len(keys), bags.numel() - int(are_offsets))
        if values.is_meta:
            bags, are_offsets = bags.new_empty(bags.numel() - int(are_offsets), device="meta"), False
            offsets = torch.empty(bags.numel() + 1, dtype=torch.int64, device="meta")
            return self._as_kjt(keys, values, weights, bags, offsets, per_key, features.length_per_key_or_none())
        if bags.dim() != 1:
            bags = self._flat(bags, per_key)
        bags = as_stored(bags)  # collectives take nothing else
        offsets, fault, borders = bag_offsets(values, bags, are_offsets, per_key, rows_per_key)
        if fault is not None:
            self._raise(fault, values, bags, are_offsets, offsets, per_key, out_of_range)
        if offsets.numel() == 1:  # TorchRec cannot add up the lengths of no bags
            borders = [0] * (len(keys) + 1)
        length_per_key = None if borders is None else [end - begin for begin, end in pairwise(borders)]
        if features.length_per_key_or_none() is not None:
            self._check_length_per_key(features, offsets, per_key, length_per_key)
        return self._as_kjt(keys, values, weights, None if are_offsets else bags, offsets, per_key, length_per_key)

    @staticmethod
    def _as_kjt(
        keys: list[str],
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor | None,
        offsets: torch.Tensor,
        per_key: list[int],
        length_per_key: list[int] | None = None,
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            offsets=offsets,
            stride_per_key_per_rank=None if len(per_key) == 1 else [[count] for count in per_key],
            length_per_key=length_per_key,
        )

    def _ids(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values = features.values()
        if not isinstance(values, torch.Tensor) or values.layout != torch.strided or values.dim() != 1:
            self._refuse(
                f"ids are {_form(values)}, but must be a dense tensor of one dimension.",
                "bad_ids",
                "pass the ids of all bags one after the other, together with the lengths of the bags.",
            )
        dtype = values.dtype
        if dtype not in _IDS:
            if dtype not in _SMALL_IDS:
                raise IdTypeError(
                    f"ids are {dtype}, but must be torch.int64, torch.int32 or smaller integers.",
                    reason="wrong_id_dtype",
                    module_path=self.collection,
                    what_to_do="convert the KeyedJaggedTensor's values to int64 before the model.",
                )
            values = values.to(torch.int64)
        return as_stored(values)

    def _weights(self, features: KeyedJaggedTensor, values: torch.Tensor) -> torch.Tensor | None:
        weights = features.weights_or_none()
        if weights is None:
            if self.is_weighted:
                self._refuse(
                    "the collection is weighted, but the batch has no weights.",
                    "missing_weights",
                    "pass weights= to the KeyedJaggedTensor, or build the collection with is_weighted=False.",
                )
            return None
        problem = ""
        if not isinstance(weights, torch.Tensor) or weights.layout != torch.strided:
            problem = f"weights are {_form(weights)}, but must be a dense tensor."
        elif weights.dim() == 0 or weights.shape[0] != values.shape[0] or (self.is_weighted and weights.dim() != 1):
            problem = f"weights have shape {list(weights.shape)}, but there are {values.shape[0]} ids."
        elif self.is_weighted and weights.dtype not in _WEIGHTS:
            problem = f"weights are {weights.dtype}, but must be floating-point numbers."
        if problem:
            self._refuse(problem, "bad_weights", "pass one floating-point weight per id.")
        if not self.is_weighted:
            return None
        if weights.device != values.device:
            self._refuse_devices("weights", weights, values)
        return as_stored(weights)

    def _bags(self, features: KeyedJaggedTensor, values: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The lengths, or the offsets if there are no lengths, as in the standard collection; whether it is offsets."""
        bags, are_offsets = features.lengths_or_none(), False
        if bags is None:
            bags, are_offsets = features.offsets_or_none(), True
        if not isinstance(bags, torch.Tensor) or bags.layout != torch.strided:
            self._refuse(
                f"lengths are {_form(bags)}, and so are offsets, but one must be a dense tensor."
                if bags is None
                else f"{'offsets' if are_offsets else 'lengths'} are {_form(bags)}, but must be a dense tensor.",
                "bad_lengths",
                _FIT_LENGTHS,
            )
        if bags.device != values.device and not values.is_meta:
            self._refuse_devices("offsets" if are_offsets else "lengths", bags, values)
        if bags.dtype not in _LENGTHS:
            if bags.dtype not in _SMALL_LENGTHS and bags.numel() > 0:
                self._refuse(f"lengths are {bags.dtype}, but must be integers.", "bad_lengths", _FIT_LENGTHS)
            bags = bags.real.to(torch.int64) if bags.is_complex() else bags.to(torch.int64)
        if are_offsets and bags.dim() != 1:
            if bags.numel() == 0 or bags.dim() == 0:
                self._refuse(f"offsets are {_form(bags)}.", "bad_lengths", _FIT_LENGTHS)
            return bags.diff(), False  # along the last dimension, as the standard collection takes them
        if are_offsets and bags.numel() == 0:
            self._refuse("offsets are empty, but must begin with 0 before the first bag.", "bad_lengths", _FIT_LENGTHS)
        return bags, are_offsets

    def _bags_per_key(self, features: KeyedJaggedTensor, keys: int, bags: int) -> list[int]:
        """One number for all keys, or one number per key."""
        if not features.variable_stride_per_key():
            batch_size = features.stride()
            if (
                batch_size == -1 and bags % keys == 0 and features.lengths_or_none() is not None
            ):  # the standard collection leaves this to torch's view
                batch_size = bags // keys
            if isinstance(batch_size, int) and batch_size >= 0 and batch_size * keys == bags:
                return [batch_size]
            self._refuse(
                f"there are {bags} lengths, but {keys} keys with {batch_size} bags each.", "bad_lengths", _FIT_LENGTHS
            )
        try:
            per_key = list(features.stride_per_key())
        except (RuntimeError, IndexError, TypeError, AttributeError, AssertionError) as error:
            self._refuse(f"the batch sizes of the keys cannot be read ({error}).", "bad_batch_sizes", _BATCH_SIZES)
        if (
            len(per_key) != keys
            or sum(per_key) != bags
            or any(not isinstance(count, int) or count < 0 for count in per_key)
        ):
            self._refuse(
                f"the batch sizes of the {keys} keys are {per_key}, but there are {bags} lengths.",
                "bad_batch_sizes",
                _BATCH_SIZES,
            )
        return per_key

    def _flat(self, lengths: torch.Tensor, per_key: list[int]) -> torch.Tensor:
        if len(per_key) == 1:
            try:
                return lengths.view(-1, *per_key).reshape(-1) if lengths.numel() else lengths.reshape(-1)
            except RuntimeError:  # a transposed view: it is not clear which bag each length belongs to
                pass
        self._refuse(f"lengths are {_form(lengths)}, which are not lengths key by key.", "bad_lengths", _FIT_LENGTHS)

    def _check_length_per_key(
        self, features: KeyedJaggedTensor, offsets: torch.Tensor, per_key: list[int], true: list[int] | None
    ) -> None:
        """Check what the KJT states besides its lengths, because the standard collection relies on it. ``true`` is what
        is right, if the host knows it.
        """
        stated = features.length_per_key()
        if true is None:
            keys = len(features.keys())
            counts = per_key * keys if len(per_key) == 1 else per_key
            ends = torch.tensor([0, *accumulate(counts)], device=offsets.device)
            true = offsets.index_select(0, ends).diff().tolist()
        if list(stated) != true:
            self._refuse(
                f"length_per_key is {stated}, but the lengths add up to {true}.",
                "bad_lengths",
                "leave length_per_key= out: the KeyedJaggedTensor computes it.",
            )

    def _raise(
        self,
        fault: Fault,
        values: torch.Tensor,
        bags: torch.Tensor,
        are_offsets: bool,
        offsets: torch.Tensor,
        per_key: list[int],
        out_of_range: Callable[[int, int], IdRangeError],
    ) -> NoReturn:
        if fault.kind == OUT_OF_RANGE:
            bag = int(torch.searchsorted(offsets, fault.position, right=True)) - 1
            key = bag // per_key[0] if len(per_key) == 1 else 0
            while len(per_key) > 1 and bag >= sum(per_key[: key + 1]):
                key += 1
            raise out_of_range(int(values[fault.position]), key)
        numbers = bags.tolist()
        lengths = [end - begin for begin, end in pairwise(numbers)] if are_offsets else numbers
        negative = next((bag for bag, length in enumerate(lengths) if length < 0), None)
        if negative is None:
            problem = f"lengths add up to {sum(lengths)}"
        elif are_offsets:
            problem = f"offsets go down from {numbers[negative]} to {numbers[negative + 1]}"
        else:
            problem = f"a bag has length {lengths[negative]}"
        self._refuse(f"{problem}, and there are {values.numel()} ids.", "bad_lengths", _FIT_LENGTHS)

    def _refuse(self, message: str, reason: str, what_to_do: str) -> NoReturn:
        raise InputError(message, reason=reason, module_path=self.collection, what_to_do=what_to_do)

    def _refuse_devices(self, subject: str, tensor: torch.Tensor, values: torch.Tensor) -> NoReturn:
        self._refuse(
            f"{subject} are on device {tensor.device}, but ids on {values.device}.",
            "several_devices",
            "move the whole KeyedJaggedTensor to one device, with its own .to(device).",
        )


_BATCH_SIZES = "pass stride_per_key_per_rank= as one list per key, whose sums add up to the number of lengths."


def _form(tensor: Any) -> str:
    """Describes in a message what should be a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        return "missing" if tensor is None else type_of(tensor)
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} "
    return f"a {layout}tensor of {tensor.dim()} dimensions"


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
