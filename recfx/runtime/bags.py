"""Gathers whole bags of a KJT: the operation behind feature selection, repeats and variable batch sizes."""

import copy
from itertools import accumulate

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.kernels.build import launch
from recfx.kernels.route.from_zero import from_zero
from recfx.kernels.route.select_keys import select_keys

# KeyedJaggedTensor.permute calls FBGEMM, whose operators elsewhere (on NPUs) go through the host, if they run at all.
FBGEMM_PERMUTES_ON = ("cpu", "cuda")


def select_bags(
    features: KeyedJaggedTensor, bags: torch.Tensor, weights: torch.Tensor | None, ids: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Copy the bags at ``[N]`` int64 positions, in that order, with the weights of their ids, if given; repeats are
    allowed. Differentiable in ``weights``. ``ids`` is how many ids these bags have together, if the caller knows; else
    the host waits for the device. Returns values, lengths ``[N]``, offsets ``[N + 1]``, weights.
    """
    if features.values().is_meta:  # the number of ids is not known, so it is left as it is
        lengths = features.values().new_empty(bags.numel(), dtype=torch.int64)
        return features.values(), lengths, lengths.new_empty(bags.numel() + 1), weights
    lengths = features.lengths().index_select(0, bags)
    if ids is None:
        ids = int(lengths.sum())
    starts = _offsets_of(features).index_select(0, bags).to(torch.int64)
    places_of = id_places if torch.compiler.is_compiling() else _id_places
    offsets, take = places_of(lengths, starts, ids)
    values = _taken(features.values(), take)
    return values, lengths, offsets, None if weights is None else _taken(weights, take)


def _taken(tensor: torch.Tensor, take: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():  # Inductor does not index what may be empty
        tensor = torch.cat([tensor, tensor.new_zeros(1)])
    return tensor.index_select(0, take)


def _id_places(lengths: torch.Tensor, starts: torch.Tensor, ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where bags of these lengths begin if they lie one after the other, int64 ``[N + 1]``; and the positions of their
    ``ids`` ids, int64 ``[ids]``, if they begin at ``starts``.
    """
    offsets = from_zero(lengths, ids)
    places = torch.repeat_interleave(starts - offsets[:-1], lengths.to(torch.int64), output_size=ids)
    return offsets, places + torch.arange(ids, device=lengths.device)


id_places = torch.library.custom_op("recfx::id_places", _id_places, mutates_args=())


@id_places.register_fake
def _(lengths: torch.Tensor, starts: torch.Tensor, ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    return starts.new_empty(lengths.numel() + 1), starts.new_empty(ids)


def _offsets_of(features: KeyedJaggedTensor) -> torch.Tensor:
    offsets = features.offsets_or_none()
    if offsets is None and features.lengths().device.type not in FBGEMM_PERMUTES_ON:
        return from_zero(features.lengths(), features.values().numel())  # TorchRec computes them by FBGEMM
    return features.offsets()


def permute_features(features: KeyedJaggedTensor, positions: list[int], keys: list[str]) -> KeyedJaggedTensor:
    """The features at ``positions``, under new names; repeats are allowed, and the weights receive gradients.
    ``features`` has one batch size.
    """
    weights, device = features.weights_or_none(), features.values().device
    if are_copied_by_kernel(features, weights):
        return _copied_by_kernel(features, positions, keys)
    stride, known = features.stride(), features.length_per_key_or_none()
    of_fbgemm = weights is None or (weights.dtype == torch.float32 and not weights.requires_grad)  # all that it takes
    if device.type in FBGEMM_PERMUTES_ON and of_fbgemm:
        if known is None:  # from the offsets, which is faster than summing lengths
            known = features.offsets()[::stride].diff().tolist() if stride else [0] * len(features.keys())
        permuted = KeyedJaggedTensor(
            features.keys(), features.values(), weights, lengths=features.lengths(), length_per_key=known
        ).permute(positions)
        values, lengths, offsets = permuted.values(), permuted.lengths(), permuted.offsets()
        weights = permuted.weights_or_none()
    else:
        # The backward of KeyedJaggedTensor.permute is wrong for subsets and repeats (torchrec 1.8.0).
        return bags_of_keys(features, positions, keys)
    ids_per_key = None if known is None else [known[position] for position in positions]
    return KeyedJaggedTensor(
        keys, values, weights, lengths=lengths, offsets=offsets, stride=stride, length_per_key=ids_per_key
    )


def bags_of_keys(features: KeyedJaggedTensor, positions: list[int], keys: list[str]) -> KeyedJaggedTensor:
    """``permute_features`` by torch's operators, which torch.compile can trace."""
    stride, known, device = features.stride(), features.length_per_key_or_none(), features.values().device
    bags = torch.tensor(positions, device=device).unsqueeze(1) * stride
    bags = (bags + torch.arange(stride, device=device)).view(-1)
    ids_per_key = None if known is None else [known[position] for position in positions]
    every_key_once, ids = sorted(positions) == list(range(len(features.keys()))), features.values().numel()
    ids = ids if every_key_once else None if ids_per_key is None else sum(ids_per_key)
    values, lengths, offsets, weights = select_bags(features, bags, features.weights_or_none(), ids)
    if values.is_meta and ids_per_key is not None and ids != values.numel():  # all values were left
        ids_per_key = None
    return KeyedJaggedTensor(
        keys, values, weights, lengths=lengths, offsets=offsets, stride=stride, length_per_key=ids_per_key
    )


def are_copied_by_kernel(features: KeyedJaggedTensor, weights: torch.Tensor | None) -> bool:
    """Whether ``permute_features`` copies a batch with these weights of ids by a kernel."""
    values = features.values()
    if values.device.type in ("cpu", "meta") or not launch.is_possible(values.device):
        return False
    if weights is not None and (weights.requires_grad or weights.dtype == torch.float64):
        return False
    return features.stride() > 0 and values.numel() < 2**31


def _copied_by_kernel(features: KeyedJaggedTensor, positions: list[int], keys: list[str]) -> KeyedJaggedTensor:
    """The host waits for the device if it does not know how many ids each key has, and how many are copied."""
    known, stride, weights = features.length_per_key_or_none(), features.stride(), features.weights_or_none()
    offsets, keys_before = _offsets_of(features).to(torch.int64).contiguous(), len(features.keys())
    count = features.values().numel()
    if known is not None or sorted(positions) != list(range(keys_before)):
        known = offsets[::stride].diff().tolist() if known is None else known
        known = [known[position] for position in positions]
        count = sum(known)
    weights = None if weights is None else weights.contiguous()
    values, offsets, weights = select_keys(features.values().contiguous(), offsets, positions, stride, count, weights)
    return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=stride, length_per_key=known)


def expanded(
    features: KeyedJaggedTensor, positions: list[int], batch_sizes: list[int], inverse: torch.Tensor, keys: list[str]
) -> KeyedJaggedTensor:
    """The features at ``positions``, each with the bags that its inverse indices name, under new names. ``batch_sizes``
    has the batch size of each key of the source; ``inverse`` is int64 ``[positions, B]``.
    """
    starts = [0, *accumulate(batch_sizes)]
    first_bag = torch.tensor([starts[position] for position in positions], device=inverse.device)
    bags = (inverse + first_bag.unsqueeze(1)).reshape(-1)
    values, lengths, offsets, weights = select_bags(features, bags, features.weights_or_none())
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths, offsets=offsets)


def with_values(
    features: KeyedJaggedTensor, values: torch.Tensor, weights: torch.Tensor | None, keys: list[str] | None = None
) -> KeyedJaggedTensor:
    """Put different values, weights and, if given, keys into the same bags."""
    return KeyedJaggedTensor(
        features.keys() if keys is None else keys, values, weights, lengths=features.lengths_or_none(),
        offsets=features.offsets(), stride=features.stride(), length_per_key=features.length_per_key_or_none(),
    )  # fmt: skip


def with_own_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Copy the lengths and offsets of a KJT, which the caller may change after the call."""
    own, offsets = copy.copy(features), features.offsets_or_none()
    own._lengths = features.lengths().clone()
    own._offsets = None if offsets is None else offsets.clone()
    return own


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory as its values are: in order, and not as a view that negates them. Operators read it so."""
    return tensor.resolve_neg().contiguous()


def all_as_stored(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch of any batch sizes, of tensors that are stored as their values are."""
    parts = (features.weights_or_none(), features.lengths_or_none(), features.offsets_or_none())
    weights, lengths, offsets = (None if part is None else as_stored(part) for part in parts)
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(), as_stored(features.values()), weights, lengths=lengths, offsets=offsets,
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )  # fmt: skip


def as_sent(features: KeyedJaggedTensor, on_host: bool = False) -> KeyedJaggedTensor:
    """Convert ids and lengths to 64 bits, and weights to float32; ``on_host``: on the host."""
    if on_host and features.values().device.type != "cpu":
        features = features.to(torch.device("cpu"))
    values, lengths, weights = features.values(), features.lengths(), features.weights_or_none()
    if (values.dtype, lengths.dtype) == (torch.int64, torch.int64) and (
        weights is None or weights.dtype == torch.float32
    ):
        return features
    weights = None if weights is None else weights.float()
    return KeyedJaggedTensor(
        features.keys(), values.long(), weights, lengths=lengths.long(), offsets=features.offsets_or_none(),
        stride=features.stride(),
    )  # fmt: skip


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The ids and bags alone, of one batch size."""
    if features.weights_or_none() is None:
        return features
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths(), stride=features.stride())


def keep_ids(features: KeyedJaggedTensor, values: torch.Tensor, kept: torch.Tensor) -> KeyedJaggedTensor:
    """Put different values, ``[n]``, into the same bags of one batch size, and leave out what is not ``kept``."""
    before = from_zero(kept, values.numel())
    weights, positions = features.weights_or_none(), torch.nonzero(kept).squeeze(1)
    weights = None if weights is None else weights.index_select(0, positions)
    return keep_ids_at(features, values.index_select(0, positions), before, weights)


def keep_ids_at(
    features: KeyedJaggedTensor, values: torch.Tensor, before: torch.Tensor, weights: torch.Tensor | None
) -> KeyedJaggedTensor:
    """The bags, of one batch size, without some of their ids, given the values and weights that are left. ``before``,
    int64 ``[n + 1]``, is the number of ids that are kept before each id.
    """
    offsets = before.index_select(0, features.offsets().to(torch.int64))
    return KeyedJaggedTensor(
        features.keys(), values, weights, lengths=offsets.diff(), offsets=offsets, stride=features.stride()
    )
