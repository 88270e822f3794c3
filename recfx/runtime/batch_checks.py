"""Checks a batch before anything is looked up, sent or inserted; an invalid batch raises one typed error.

Whatever the standard collection accepts is accepted, and whatever it fails on is an ``InputError``. Sizes, dtypes and
devices are read from the tensors; lengths, offsets and ids are read once, by the operator ``bag_offsets``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.errors import IdRangeError, IdTypeError, InputError, type_of
from recfx.kernels.lookup.bag_offsets import OUT_OF_RANGE, Fault, bag_offsets
from recfx.runtime.bags import as_stored

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
