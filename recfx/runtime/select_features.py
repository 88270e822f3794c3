"""``select_features``: puts the batch's keys into the collection's order, by name, and checks the batch.

What the standard collection accepts is accepted, except for offsets that are a matrix, and whatever it fails on is one
typed error, before anything is trained, sent or inserted. Sizes, dtypes and devices are read from the tensors;
lengths, offsets and ids are read once, by the operator ``bag_offsets``.

Later nodes rely on what leaves this node: keys in output order (``feature@table`` if a feature reads several tables),
one batch size, offsets that ascend from 0 to the number of ids, 64-bit or 32-bit ids, weights only if the collection is
weighted, and ids in range for tables without an index.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.errors import IdRangeError, IdTypeError, InputError, MissingFeatureError, did_you_mean, type_of
from recfx.ir.tables import TableSpec
from recfx.kernels.lookup.bag_offsets import OUT_OF_RANGE, Fault, bag_offsets, masked_bags
from recfx.runtime.bags import (
    are_copied_by_kernel,
    as_sent,
    as_stored,
    bags_of_keys,
    expanded,
    permute_features,
    with_values,
)
from recfx.runtime.base import NodeModule, opaque
from recfx.runtime.in_flight import is_replay
from recfx.runtime.late_checks import check_later, settle
from recfx.runtime.operators import check_batch, new_call
from recfx.runtime.table_store import TableStore
from recfx.runtime.transfers import pins

_IDS = (torch.int64, torch.int32)
_SMALL_IDS = (torch.int16, torch.int8, torch.uint8, torch.bool)  # the standard collection accepts these as well
_LENGTHS = (torch.int64, torch.int32)
_SMALL_LENGTHS = (torch.int16, torch.int8, torch.uint8)
_WEIGHTS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_WHAT_TO_DO = {
    "activation_checkpointing": "leave the collection out of the checkpoint.",
    "bad_batch_sizes": "pass stride_per_key_per_rank= as one list per key, whose sums add up to the number of lengths.",
    "bad_ids": "pass the ids of all bags one after the other, together with the lengths of the bags.",
    "bad_inverse_indices": "pass inverse_indices=(names, indices), indices [features, B] of bags within each feature's "
    "own batch.",
    "bad_lengths": "build the KeyedJaggedTensor with lengths (or offsets) of all its bags, which add up to its values.",
    "bad_weights": "pass one floating-point weight per id.",
    "missing_feature": "give the batch every feature of the collection, if need be as empty bags.",
    "missing_weights": "pass weights= to the KeyedJaggedTensor, or build the collection with is_weighted=False.",
    "not_a_keyed_jagged_tensor": "pass a torchrec.KeyedJaggedTensor, or a TensorDict of jagged tensors.",
    "several_devices": "move the whole KeyedJaggedTensor to one device that has data, with its own .to(device).",
    "variable_batch_without_inverse_indices": "pass inverse_indices= to the KeyedJaggedTensor, or one batch size for "
    "all features.",
    "weights_require_grad": "detach the weights if nothing behind them is trained; else leave it unsharded.",
    "wrong_id_dtype": "convert the KeyedJaggedTensor's values to int64 before the model.",
}


def _is_dense(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided


def why_not_plain(features: Any) -> str:
    """Why a batch cannot be read in a graph of torch.compile, which traces this; ``""`` if it can."""
    if isinstance(features, KeyedJaggedTensor) and not features.variable_stride_per_key():
        has_bags = features.lengths_or_none() is not None or features.offsets_or_none() is not None
        if has_bags and features.inverse_indices_or_none() is None:
            return ""
    return "recfx: one graph reads KeyedJaggedTensors that have lengths and one batch size, and no others."


def _form(tensor: Any) -> str:
    """Describes in a message what should be a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        return "missing" if tensor is None else type_of(tensor)
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} "
    return f"a {layout}tensor of {tensor.dim()} dimensions"


# Batches usually have one of a few orders of keys, each of which is computed once. The limit keeps memory bounded if
# every batch has a different order.
_MOST_ORDERS = 16


_Given = tuple[torch.Tensor, torch.Tensor, bool, list[int], torch.Tensor]  # what ``bag_offsets`` is asked about


class _KeyOrder(NamedTuple):
    """How a batch's keys relate to the features of the collection."""

    positions: list[int]  # of the collection's features in the keys
    is_same: bool  # the keys are those features, in that order
    is_permutation: bool  # the keys are those features, each of them once
    rows_per_key: torch.Tensor  # int64 [keys]: ids must be below this; -1 if any id is valid


class SelectFeatures(NodeModule):
    """Select, order and check the features of one collection."""

    store: TableStore | None = None  # of the collection's tables, and how many graphs had been made of them before
    made_for = 0

    def __init__(self, collection: str, tables: tuple[TableSpec, ...], is_weighted: bool) -> None:
        super().__init__()
        self.collection = collection
        self.tables = tables
        self.is_weighted = is_weighted
        self.feature_names = [feature for table in tables for feature in table.feature_names]
        self.keys = [name for table in tables for name in table.embedding_names]
        self._may_lose_rows = any(table.evicts or table.admits for table in tables)
        self._is_sent = self._converts = self._on_host = self._weights_are_sent = False
        # Unsharded, TorchRec ignores inverse indices where it does not pool.
        self._expands = self._pools = tables[0].is_pooled
        self._orders: dict[tuple[str, ...], _KeyOrder] = {}
        self._last_order: tuple[list[str] | None, Any] = None, None
        # Whether what reads the batch may be given one whose check is not waited for: not in training if it gives rows
        # to ids, and not if batches are selected ahead, before an earlier one has trained.
        self.may_mask = self.gives_rows = self.is_ahead = False
        self.lookups: list[Any] = []  # of this graph
        self.has_expanded = False  # whether any batch had different batch sizes per feature; for the report

    def prepare_to_send(self, world_size: int, on_host: bool, routes: bool = True) -> None:
        """Prepare for sending ids to other ranks: they are converted to one type, whatever type the batch has. Ranks
        that sent different types would misread each other, and one rank alone only ``routes`` them. ``on_host``: ids
        are sent and hashed on the host. If rows are not pooled, the output has ids and lengths as they are, so they are
        converted when they are sent.
        """
        are_sent = world_size > 1
        self._is_sent, self._expands = True, True
        self._converts, self._on_host = self.tables[0].is_pooled and (are_sent or routes), on_host and are_sent
        self._weights_are_sent = self.is_weighted and are_sent

    def train(self, mode: bool = True) -> SelectFeatures:
        """Set the mode; a batch that is wrong is refused before, at the latest."""
        settle(self)
        return super().train(mode)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Select from any KJT (or TensorDict) that holds the keys; returns ``[F]`` keys in the collection's order.

        Raises:
            MissingFeatureError: a key is absent.
            IdTypeError: ids are not integers, or are unsigned integers of more than 8 bits.
            IdRangeError: an id of a table without an index is not one of its rows.
            InputError: its parts do not fit together, or the collection; weights require a gradient, which other ranks
                do not send back; a batch on meta is to be sent; ``activation_checkpointing``.

        On a device, lengths and ids may be refused later; see ``late_checks``.
        """
        settle(self)
        if self._may_lose_rows and self.training and is_replay():  # their ids may have other rows by then
            self.refuse(
                "activation_checkpointing",
                "a forward runs inside a backward, as with activation checkpointing, but tables of the collection "
                "evict or admit ids: the rows of the first run may be gone.",
            )
        if not isinstance(features, KeyedJaggedTensor):
            features = self.as_keyed_jagged(features)
        keys, order = self._last_order
        if keys != features.keys():
            order = self._order_of(features.keys())
        named_inverse = features.inverse_indices_or_none()
        may_mask = self.may_mask and not (self.is_ahead or (self.gives_rows and self.training))
        checked = self.checked(features, order, may_mask and named_inverse is None)
        if self._is_sent and checked.values().is_meta:
            self.refuse("several_devices", "the batch is on meta, so it has no ids to send to other ranks.")
        if self._weights_are_sent and torch.is_grad_enabled() and checked.weights().requires_grad:
            problem = "the batch's weights require a gradient, but other ranks do not send one back."
            self.refuse("weights_require_grad", problem)
        varies = checked.variable_stride_per_key()
        if varies and not self._expands:
            selected = self._of_keys(checked, order.positions)
        elif self._expands and (named_inverse is not None or varies):
            batch_sizes = checked.stride_per_key()
            sizes = [batch_sizes[position] for position in order.positions]
            device = checked.values().device
            inverse = self.inverse_indices(named_inverse, self.feature_names, sizes, device)
            self.has_expanded = True
            selected = expanded(checked, order.positions, batch_sizes, inverse, self.keys)
        elif not order.is_same:
            selected = permute_features(checked, order.positions, self.keys)
        elif checked.keys() == self.keys:
            selected = checked
        else:
            selected = with_values(checked, checked.values(), checked.weights_or_none(), self.keys)
        return as_sent(selected, self._on_host) if self._converts else selected

    def not_in_graph(self, trains: bool) -> str:
        return "" if self.store is not None and not self._is_sent else "its ids are sent to other ranks."

    def in_graph(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``forward`` of a plain batch, whose checks are an operator."""
        if why := why_not_plain(features):
            return opaque(why, self._call_impl, features)
        keys, values, weights = list(features.keys()), features.values(), features.weights_or_none()
        bags, stride = features.lengths_or_none(), features.stride()
        are_offsets = bags is None
        given = features.offsets() if bags is None else bags
        how = are_offsets, keys, stride, torch.is_grad_enabled(), new_call(self)
        offsets = check_batch(values, weights, given, *how)
        lengths = offsets.diff() if bags is None else bags.reshape(-1)
        if values.dtype not in _IDS:
            values = values.to(torch.int64)
        positions = [max(position, 0) for position in self._positions_in(keys)]  # what is missing has been refused
        is_same = positions == list(range(len(keys)))
        # How many ids each key has is read only if it matters.
        counts = None if is_same and self._pools else lengths.view(len(keys), stride).sum(dim=1).tolist()
        weights = weights.contiguous() if self.is_weighted and weights is not None else None
        parts: dict[str, Any] = {"lengths": lengths, "offsets": offsets, "stride": stride, "length_per_key": counts}
        batch = KeyedJaggedTensor(self.keys if is_same else keys, values.contiguous(), weights, **parts)
        return batch if is_same else bags_of_keys(batch, positions, self.keys)

    def check_batch(
        self, values: torch.Tensor, weights: torch.Tensor | None, bags: torch.Tensor, are_offsets: bool,
        keys: list[str], batch_size: int, trains: bool,
    ) -> torch.Tensor:  # fmt: skip
        """What the operator of this name does."""
        assert self.store is not None
        settle(self)
        with torch.set_grad_enabled(trains):
            self.store.begin_forward(self.made_for, self.collection)
        parts = {"offsets" if are_offsets else "lengths": bags, "stride": batch_size}
        features = KeyedJaggedTensor(keys, values, weights, **parts)
        offsets = self.checked(features, self._order_of(keys)).offsets()
        return offsets.clone() if offsets is bags else offsets

    def _of_keys(self, features: KeyedJaggedTensor, positions: list[int]) -> KeyedJaggedTensor:
        """The features at ``positions``, each with its own number of samples; without weights."""
        by_key = list(features.to_dict().values())
        chosen = [by_key[position] for position in positions]
        return KeyedJaggedTensor(
            self.keys,
            torch.cat([feature.values() for feature in chosen]),
            lengths=torch.cat([feature.lengths() for feature in chosen]),
            stride_per_key_per_rank=[[feature.lengths().numel()] for feature in chosen],
            length_per_key=[feature.values().numel() for feature in chosen],
        )

    def _order_of(self, keys: list[str]) -> _KeyOrder:
        cache_key = tuple(keys)
        order = self._orders.pop(cache_key, None) or self._new_order(keys)  # threads share them, so any may be gone
        self._orders = dict([*self._orders.items(), (cache_key, order)][-_MOST_ORDERS:])
        self._last_order = list(keys), order
        return order

    def _new_order(self, keys: list[str]) -> _KeyOrder:
        positions, rows = self._positions_in(keys), [-1] * len(keys)
        missing = [name for name, position in zip(self.feature_names, positions, strict=True) if position < 0]
        if missing:
            others = [key for key in keys if key not in self.feature_names]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            guess = did_you_mean(missing[0], others, by=True)
            problem = f"the batch lacks feature {missing[0]!r}{guess}{more}; it has {keys}."
            self.refuse("missing_feature", problem, MissingFeatureError)
        for position, limit in zip(positions, self._row_limits(), strict=True):
            if limit >= 0:  # a feature may read several tables
                rows[position] = limit if rows[position] < 0 else min(rows[position], limit)
        every, limits = list(range(len(keys))), torch.tensor(rows, device="cpu")
        return _KeyOrder(positions, positions == every, sorted(positions) == every, limits)

    def _positions_in(self, keys: list[str]) -> list[int]:
        """Where the features of the collection are in the keys: the last of equal ones; -1 for one that is missing."""
        position_of = {key: position for position, key in enumerate(keys)}
        return [position_of.get(name, -1) for name in self.feature_names]

    def _row_limits(self) -> list[int]:
        """Per feature, the number of rows of its table; -1 if an index takes any id."""
        return [table.row_limit for table in self.tables for _ in table.feature_names]

    def _out_of_range(self, id_: int, key: int, order: _KeyOrder) -> IdRangeError:
        feature = next(
            feature
            for feature, (position, limit) in enumerate(zip(order.positions, self._row_limits(), strict=True))
            if position == key and limit >= 0 and not 0 <= id_ < limit
        )
        table = next(table for table in self.tables if self.keys[feature] in table.embedding_names)
        why = f"whose rows are 0 to {table.num_embeddings - 1}"
        what_to_do = (
            "map ids below the table's rows; for raw ids convert with hashing=recfx.HashConfig.raw_ids(), or with "
            "rows= beyond the table's."
        )
        if table.never_needs_index:
            why = f"whose index was left out because its ids were declared to be {table.id_range}"
            what_to_do = "convert again, with id_ranges that hold, or without."
        return IdRangeError(
            f"id {id_} of feature {self.feature_names[feature]!r} is out of range for table {table.name!r}, {why}.",
            reason="id_out_of_range",
            module_path=self.collection,
            what_to_do=what_to_do,
        )

    # The checks

    def refuse(self, reason: str, message: str, error: type[InputError] = InputError) -> NoReturn:
        raise error(message, reason=reason, module_path=self.collection, what_to_do=_WHAT_TO_DO[reason])

    def as_keyed_jagged(self, features: Any) -> KeyedJaggedTensor:
        problem = f"the batch is {type_of(features)}, not a KeyedJaggedTensor."
        if isinstance(features, TensorDict):
            try:
                return maybe_td_to_kjt(features, None)
            except (AttributeError, TypeError, RuntimeError, AssertionError) as error:
                problem = f"the TensorDict is not a batch of jagged tensors ({type(error).__name__}: {error})."
        self.refuse("not_a_keyed_jagged_tensor", problem)

    def checked(self, features: KeyedJaggedTensor, order: _KeyOrder, may_mask: bool = False) -> KeyedJaggedTensor:
        """Check a batch and return it in the form that later nodes rely on. Returns A KJT of contiguous tensors, none a
        negated view: int32 or int64 ids; int32 or int64 lengths (``[bags]``) or none; int64 offsets from 0 to the
        number of ids; weights only if the collection is weighted; one batch size, or a batch size per key. On meta,
        only sizes are checked, because nothing can be read. If it ``may_mask``, a batch that is wrong may be refused
        later, and its bags are empty.
        """
        keys, values = features.keys(), features.values()
        if not (isinstance(values, torch.Tensor) and values.layout == torch.strided and values.dim() == 1):
            self.refuse("bad_ids", f"ids are {_form(values)}, but must be a dense tensor of one dimension.")
        if values.dtype not in _IDS:
            if values.dtype not in _SMALL_IDS:
                problem = f"ids are {values.dtype}, but must be torch.int64, torch.int32 or smaller integers."
                self.refuse("wrong_id_dtype", problem, IdTypeError)
            values = values.to(torch.int64)
        weights = features.weights_or_none()
        if weights is not None or self.is_weighted:
            weights = self._weights(weights, values)
        values = as_stored(values)
        bags, are_offsets = self._bags(features, values)
        count = bags.numel() - int(are_offsets)
        per_key = self._bags_per_key(features, len(keys), count)
        lengths: torch.Tensor | None
        length_per_key = features.length_per_key_or_none()
        if values.is_meta:
            lengths = bags.new_empty(count, device="meta")
            offsets = torch.empty(count + 1, dtype=torch.int64, device="meta")
        else:
            if bags.dim() != 1 and (len(per_key) > 1 or not bags.is_contiguous()):  # whose lengths may be transposed
                self.refuse("bad_lengths", f"lengths are {_form(bags)}, which are not lengths key by key.")
            bags = as_stored(bags.reshape(-1))  # collectives take nothing else
            given = (values, bags, are_offsets, per_key, order.rows_per_key)
            may_mask = may_mask and self._waits_for_nothing(features, weights, order)
            masked = masked_bags(*given, self.gives_rows) if may_mask else None
            if masked is not None:
                (offsets, values, wrong), borders = masked, None
                check_later(self, wrong, partial(self._refuse_masked, given, order))
            else:
                offsets, fault, borders = bag_offsets(*given)
                if fault is not None:
                    self._raise(fault, offsets, given, order)
            if count == 0:  # TorchRec cannot add up the lengths of no bags
                borders = [0] * (len(keys) + 1)
            # What the batch says besides its lengths is not read.
            length_per_key = None if borders is None else [end - begin for begin, end in pairwise(borders)]
            lengths = None if are_offsets else bags
        return KeyedJaggedTensor(
            keys, values, weights, lengths=lengths, offsets=offsets, stride=per_key[0] if len(per_key) == 1 else None,
            stride_per_key_per_rank=None if len(per_key) == 1 else [[bags_of_key] for bags_of_key in per_key],
            length_per_key=length_per_key,
        )  # fmt: skip

    def _waits_for_nothing(self, features: KeyedJaggedTensor, weights: torch.Tensor | None, order: _KeyOrder) -> bool:
        """Whether the check of the batch is all that the host would wait for before its rows are looked up."""
        moves = not order.is_same and not (order.is_permutation and are_copied_by_kernel(features, weights))
        if moves or features.variable_stride_per_key() or not pins(features.values().device.type):
            return False
        return all(lookup.takes_masked for lookup in self.lookups)

    def _refuse_masked(self, given: _Given, order: _KeyOrder) -> None:
        offsets, fault, _ = bag_offsets(*given)
        if fault is None:
            problem = "lengths or ids were wrong, but the batch has been changed in place since then"
            self.refuse("bad_lengths", f"{problem}, and there are {given[0].numel()} ids.")
        self._raise(fault, offsets, given, order)

    def _weights(self, weights: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
        if weights is None:
            self.refuse("missing_weights", "the collection is weighted, but the batch has no weights.")
        problem = ""
        if not _is_dense(weights):
            problem = f"weights are {_form(weights)}, but must be a dense tensor."
        elif weights.dim() == 0 or weights.shape[0] != values.shape[0] or (self.is_weighted and weights.dim() != 1):
            problem = f"weights have shape {list(weights.shape)}, but there are {values.shape[0]} ids."
        elif self.is_weighted and weights.dtype not in _WEIGHTS:
            problem = f"weights are {weights.dtype}, but must be floating-point numbers."
        if problem:
            self.refuse("bad_weights", problem)
        if not self.is_weighted:
            return None
        if weights.device != values.device:
            self._refuse_device("weights", weights, values)
        return as_stored(weights)

    def _bags(self, features: KeyedJaggedTensor, values: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The lengths, or the offsets if there are no lengths, as in the standard collection; whether it is offsets."""
        bags, are_offsets, subject = features.lengths_or_none(), False, "lengths"
        if bags is None:
            bags, are_offsets, subject = features.offsets_or_none(), True, "offsets"
        if bags is None:
            self.refuse("bad_lengths", "lengths are missing, and so are offsets, but one must be a dense tensor.")
        if not (isinstance(bags, torch.Tensor) and bags.layout == torch.strided):
            self.refuse("bad_lengths", f"{subject} are {_form(bags)}, but must be a dense tensor.")
        if bags.device != values.device and not values.is_meta:
            self._refuse_device(subject, bags, values)
        if bags.dtype not in _LENGTHS:
            if bags.dtype not in _SMALL_LENGTHS and bags.numel() > 0:
                self.refuse("bad_lengths", f"lengths are {bags.dtype}, but must be integers.")
            bags = bags.to(torch.int64)
        if not are_offsets:
            return bags, False
        if bags.dim() != 1 or bags.numel() == 0:
            form = "empty" if bags.numel() == 0 else _form(bags)
            self.refuse("bad_lengths", f"offsets are {form}, but must be [bags + 1], with 0 before the first bag.")
        return bags, True

    def _bags_per_key(self, features: KeyedJaggedTensor, keys: int, bags: int) -> list[int]:
        if not features.variable_stride_per_key():
            batch_size = features.stride()
            if isinstance(batch_size, int) and batch_size >= 0 and batch_size * keys == bags:
                return [batch_size]
            self.refuse("bad_lengths", f"there are {bags} lengths, but {keys} keys with {batch_size} bags each.")
        try:
            per_key = list(features.stride_per_key())
        except (RuntimeError, IndexError, TypeError, AttributeError, AssertionError) as error:
            self.refuse("bad_batch_sizes", f"the batch sizes of the keys cannot be read ({error}).")
        counts = [count for count in per_key if isinstance(count, int) and count >= 0]
        if len(per_key) != keys or len(counts) != keys or sum(counts) != bags:
            problem = f"the batch sizes of the {keys} keys are {per_key}, but there are {bags} lengths."
            self.refuse("bad_batch_sizes", problem)
        return per_key

    def _raise(self, fault: Fault, offsets: torch.Tensor, given: _Given, order: _KeyOrder) -> NoReturn:
        values, bags, are_offsets, per_key, _ = given
        if fault.kind == OUT_OF_RANGE:
            bag = int(torch.searchsorted(offsets, fault.position, right=True)) - 1
            if len(per_key) == 1:
                key = bag // per_key[0]
            else:
                key = next(number for number, end in enumerate(accumulate(per_key)) if bag < end)
            raise self._out_of_range(int(values[fault.position]), key, order)
        numbers = bags.tolist()
        lengths = [end - begin for begin, end in pairwise(numbers)] if are_offsets else numbers
        negative = next((bag for bag, length in enumerate(lengths) if length < 0), None)
        if negative is None:
            problem = f"lengths add up to {sum(lengths)}"
        elif are_offsets:
            problem = f"offsets go down from {numbers[negative]} to {numbers[negative + 1]}"
        else:
            problem = f"a bag has length {lengths[negative]}"
        self.refuse("bad_lengths", f"{problem}, and there are {values.numel()} ids.")

    def _refuse_device(self, subject: str, tensor: torch.Tensor, values: torch.Tensor) -> NoReturn:
        self.refuse("several_devices", f"{subject} are on device {tensor.device}, but ids on {values.device}.")

    def inverse_indices(
        self,
        named: tuple[list[str], torch.Tensor] | None,
        names: list[str],
        batch_sizes: list[int],
        device: torch.device,
    ) -> torch.Tensor:
        """The checked inverse indices of features of these names and batch sizes: int64 ``[features, B]`` on
        ``device``, each within the feature's own batch. Without ``named`` (names and ``[names, B]`` indices, as in
        ``KeyedJaggedTensor``), every feature's bags are the full batch. As in the standard collection,
        ``feature@table`` is one for the feature.
        """
        names = [name.split("@")[0] for name in names]
        inverse = None if named is None else self._indices_of(names, *named)
        if inverse is None or inverse.numel() == 0:
            if len(set(batch_sizes)) > 1:
                problem = "features have different batch sizes, but there are no inverse indices to join them."
                self.refuse("variable_batch_without_inverse_indices", problem)
            return torch.arange(batch_sizes[0], device=device).expand(len(batch_sizes), -1)
        if device.type == "meta":
            return inverse.to(device)
        if inverse.is_meta:
            self.refuse("several_devices", f"inverse_indices are on device meta, but ids on {device}.")
        limits = torch.tensor(batch_sizes, device=inverse.device).unsqueeze(1)
        wrong = torch.nonzero((inverse < 0) | (inverse >= limits))
        if wrong.numel():
            feature, sample = wrong[0].tolist()
            self.refuse(
                "bad_inverse_indices",
                f"the inverse index {int(inverse[feature, sample])} of feature {names[feature]!r} is outside its "
                f"{batch_sizes[feature]} bags.",
            )
        return inverse.to(device)

    def _indices_of(self, names: list[str], keys: list[str], indices: torch.Tensor) -> torch.Tensor:
        """The rows of ``indices`` that belong to the features of these names."""
        position_of, problem = {key: position for position, key in enumerate(keys)}, ""
        missing = [name for name in names if name not in position_of]
        is_dtype = isinstance(indices, torch.Tensor) and (indices.dtype in _IDS or indices.numel() == 0)
        if missing:
            problem = f"there are none for feature {missing[0]!r}, only for {list(keys)}."
        elif not _is_dense(indices) or indices.dim() != 2 or not is_dtype:
            form = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, torch.Tensor) else type_of(indices)
            problem = f"they are {form}, but must be int64 or int32 [features, batch size]."
        elif max(position_of[name] for name in names) >= indices.shape[0]:
            problem = f"there are {len(keys)} names, but indices for {indices.shape[0]} features."
        if problem:
            self.refuse("bad_inverse_indices", f"inverse_indices do not fit the collection: {problem}")
        rows = torch.tensor([position_of[name] for name in names], device=indices.device)
        return indices.index_select(0, rows).to(torch.int64)
