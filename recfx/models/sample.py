"""Sample inputs: how the user passes them, and how they are copied and resized for checks."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy
import torch
from tensordict import TensorDict
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.models.nests import change_leaves, leaves_of
from recfx.runtime.bags import select_bags

Change = Callable[[torch.Tensor], torch.Tensor]


class Sample:
    """One call of a model: ``Sample(dense, kjt, labels=labels)``.

    A plain tuple stands for positional arguments alone.

    Example:
        >>> call = recfx.Sample(features=batch)
        >>> model = recfx.convert(Model(), call)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        given = [*map(_brief, self.args), *(f"{name}={_brief(value)}" for name, value in self.kwargs.items())]
        return f"Sample({', '.join(given)})"

    @classmethod
    def of(cls, sample: Any) -> Sample:
        """Accept a Sample, a tuple or list of positional arguments, or one argument.

        Example:
            >>> recfx.Sample.of((batch,)).args[0] is batch
            True
        """
        if isinstance(sample, cls):
            return sample
        if type(sample) in (tuple, list):
            return cls(*sample)
        return cls(sample)

    def clone(self) -> Sample:
        """A copy with fresh tensors, because some models change their batch in place.

        Example:
            >>> copy = recfx.Sample(batch).clone()
            >>> copy.args[0] is batch
            False
        """
        return Sample(*(clone_value(value) for value in self.args), **clone_value(self.kwargs))

    def on_meta(self, *models: nn.Module) -> bool:
        """Whether any of its tensors, or of the parameters of ``models``, is on meta: nothing can be computed then.

        Example:
            >>> recfx.Sample(batch).on_meta()
            False
        """
        parameters = chain.from_iterable(model.parameters() for model in models)
        return any(tensor.is_meta for tensor in chain(tensors_of((self.args, self.kwargs)), parameters))

    def resized(self) -> Sample | None:
        """This call with the first sample repeated at the end, or None if the batch size is not known.

        Example:
            >>> recfx.Sample(batch).resized().args[0].stride()
            3
        """
        return self._with(lambda batch_size: [*range(batch_size), 0])

    def sizes(self) -> tuple[int | None, dict[str, Fraction]]:
        """The batch size, None if it is not known, and the mean number of ids per bag of each feature of its KJTs.

        Example:
            >>> recfx.Sample(batch).sizes()
            (2, {'user': Fraction(3, 2)})
        """
        value = (self.args, self.kwargs)
        ids: Counter[str] = Counter()
        bags: Counter[str] = Counter()
        for leaf in leaves_of(value):
            if not isinstance(leaf, KeyedJaggedTensor) or any(tensor.is_meta for tensor in tensors_of(leaf)):
                continue
            of_keys = zip(leaf.keys(), leaf.length_per_key(), leaf.stride_per_key(), strict=True)
            for key, count, stride in of_keys:
                ids[key] += int(count)
                bags[key] += int(stride)
        return _batch_size(value) or None, {key: Fraction(ids[key], bags[key]) for key in bags if bags[key]}

    def _with(self, taken: Callable[[int], list[int]]) -> Sample | None:
        batch_size = _batch_size((self.args, self.kwargs))
        if not batch_size:
            return None
        take = torch.tensor(taken(batch_size), dtype=torch.int64)
        return self._changed(lambda value: _take(value, batch_size, take))

    def _changed(self, change: Callable[[Any], Any]) -> Sample:
        """This call with changed leaves; a TensorDict changes as a KJT would."""

        def of_leaf(leaf: Any) -> Any:
            features = _keyed_jagged_of(leaf)
            return _tensor_dict(change(features), leaf) if isinstance(leaf, TensorDict) and features else change(leaf)

        args, kwargs = change_leaves((self.args, self.kwargs), of_leaf)
        return Sample(*args, **kwargs)


def first(call: Sample) -> Sample | None:
    """The call with its first sample alone, or None if the batch size is not known."""
    return call._with(lambda _: [0])


def without_samples(call: Sample) -> Sample | None:
    """The call with no sample at all, or None if the batch size is not known, or it has a TensorDict."""
    is_dict = any(isinstance(leaf, TensorDict) for leaf in leaves_of((call.args, call.kwargs)))
    return None if is_dict else call._with(lambda _: [])


def without_ids(call: Sample) -> Sample | None:
    """The call with empty bags, or None if it has no KJT."""
    return None if _first_keyed_jagged((call.args, call.kwargs)) is None else call._changed(_without_ids)


def strided(call: Sample) -> Sample:
    """The call with tensors that are not contiguous."""
    return call._changed(lambda leaf: _with_tensors(leaf, _as_column, _as_column, _as_column))


def varied(call: Sample, *, ids: bool) -> Sample:
    """The call with greater floats, and other ids in its KJTs if ``ids``, because a sample's may all be equal."""
    random_numbers = torch.Generator().manual_seed(0)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        return torch.rand(tensor.shape, generator=random_numbers).to(tensor.device)

    def greater(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + drawn(tensor).to(tensor.dtype) if tensor.is_floating_point() else _clone(tensor)

    return call._changed(lambda leaf: _with_tensors(leaf, greater, lambda x: x ^ (drawn(x) < 0.5) if ids else x))


def filled(call: Sample, *values: float) -> Sample | None:
    """The call with these values in turn in all its floats, or, if they are integers, in all its dense integers; None
    if it has none.
    """
    content, changed = torch.tensor(values), list[torch.Tensor]()

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() != content.is_floating_point():
            return _clone(tensor)
        changed.append(tensor)
        return content[torch.arange(tensor.numel()) % len(values)].to(tensor).view(tensor.shape)

    filled_call = call._changed(lambda leaf: _with_tensors(leaf, fill))
    return filled_call if changed else None


def clone_value(value: Any) -> Any:
    """A copy that shares no tensors; leaf tensors stay leaves, and require gradients as before."""
    return change_leaves(value, lambda leaf: _with_tensors(leaf, _clone, _clone))


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A clone; torch makes clones of columns and of expanded tensors contiguous, but these stay strided."""
    clone = tensor.clone()
    return clone if tensor.layout != torch.strided or clone.stride() == tensor.stride() else _as_column(clone)


def _as_column(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as every second element of another, whose rest must not be read: NaN, or 0, which any id may be."""
    rest = torch.full_like(tensor, math.nan if tensor.is_floating_point() else 0)
    return torch.stack([tensor, rest], dim=-1)[..., 0]


def _with_tensors(leaf: Any, dense: Change, ids: Change = _unchanged, lengths: Change = _clone) -> Any:
    """A copy of a leaf. Changed are a tensor and the weights of a KJT by ``dense``, its values by ``ids``, and the rest
    of it by ``lengths``.
    """

    def copied(change: Change, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else change(tensor.detach()).requires_grad_(tensor.requires_grad)

    if isinstance(leaf, torch.Tensor):
        return copied(dense, leaf)
    if not isinstance(leaf, KeyedJaggedTensor):
        return copy.deepcopy(leaf)
    parts = leaf.keys(), copied(ids, leaf.values()), copied(dense, leaf.weights_or_none())
    inverse = leaf.inverse_indices_or_none()
    if leaf.variable_stride_per_key() or inverse is not None:
        return KeyedJaggedTensor(
            *parts,
            lengths=copied(lengths, leaf.lengths()),
            stride_per_key_per_rank=leaf.stride_per_key_per_rank() or None,
            inverse_indices=None if inverse is None else (list(inverse[0]), copied(lengths, inverse[1])),
        )
    sizes = (copied(lengths, tensor) for tensor in (leaf.lengths_or_none(), leaf.offsets_or_none()))
    return KeyedJaggedTensor(*parts, **dict(zip(("lengths", "offsets"), sizes, strict=True)), stride=leaf.stride())


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in a nest of containers, dataclasses and TorchRec types, in a fixed order."""
    tensors: list[torch.Tensor] = []
    for leaf in leaves_of(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, KeyedTensor):
            tensors.append(leaf.values())
        elif isinstance(leaf, (KeyedJaggedTensor, JaggedTensor)):
            weights = leaf.weights_or_none()
            tensors += [leaf.values(), leaf.lengths(), *([] if weights is None else [weights])]
    return tensors


def _batch_size(value: Any) -> int:
    """The batch size of the first KJT; without one, the leading dimension of the first tensor."""
    features = _first_keyed_jagged(value)
    if features is not None:
        return 0 if features.variable_stride_per_key() else int(features.stride())
    return next((int(tensor.shape[0]) for tensor in tensors_of(value) if tensor.dim() > 0), 0)


def _brief(value: Any) -> str:
    """What a value is, and the shape of a tensor: never what is in it."""
    name = type(value).__name__
    return f"{name}{list(value.shape)}" if isinstance(value, torch.Tensor) else name


def _first_keyed_jagged(value: Any) -> KeyedJaggedTensor | None:
    return next(filter(None, map(_keyed_jagged_of, leaves_of(value))), None)


def _keyed_jagged_of(value: Any) -> KeyedJaggedTensor | None:
    """A KJT, or what a TensorDict of jagged tensors is as one."""
    if isinstance(value, TensorDict) and all(getattr(part, "_values", None) is not None for part in value.values()):
        return maybe_td_to_kjt(value, None)
    return value if isinstance(value, KeyedJaggedTensor) else None


def _tensor_dict(features: KeyedJaggedTensor, like: TensorDict) -> TensorDict:
    jagged = features.to_dict()
    parts = {key: torch.nested.nested_tensor_from_jagged(jagged[key].values(), jagged[key].offsets()) for key in jagged}
    return TensorDict(parts, batch_size=[features.stride()] if like.batch_size else [])


def _without_ids(value: Any) -> Any:
    """Jagged values without any, because values that come with ids are as many; what is not jagged stays as it is."""
    if isinstance(value, JaggedTensor) or (
        isinstance(value, KeyedJaggedTensor) and not value.variable_stride_per_key()
    ):
        weights = value.weights_or_none()
        return _like(value, value.values()[:0], None if weights is None else weights[:0], value.lengths() * 0)
    return value


def _take(value: Any, batch_size: int, take: torch.Tensor) -> Any:
    """These samples of a batch; what is no batch of this size stays as it is."""
    if isinstance(value, KeyedJaggedTensor):
        if value.variable_stride_per_key() or value.stride() != batch_size:
            return value
        return _bags(value, (torch.arange(len(value.keys())).unsqueeze(1) * batch_size + take).view(-1))
    if isinstance(value, JaggedTensor) and value.lengths().numel() == batch_size:
        return _bags(value, take)
    if isinstance(value, KeyedTensor) and value.key_dim() == 1:
        return KeyedTensor(value.keys(), value.length_per_key(), _take(value.values(), batch_size, take))
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != batch_size:
        return value
    return value.detach().index_select(0, take.to(value.device)).requires_grad_(value.requires_grad)


def _bags(value: KeyedJaggedTensor | JaggedTensor, bags: torch.Tensor) -> Any:
    weights, values = value.weights_or_none(), value.values()
    detached = None if weights is None else weights.detach()
    features = KeyedJaggedTensor(["values"], values.detach(), lengths=value.lengths().view(-1))
    values_of_bags, lengths, _, weights_of_bags = select_bags(features, bags.to(values.device), detached)
    if weights is not None and weights_of_bags is not None:
        weights_of_bags.requires_grad_(weights.requires_grad)
    return _like(value, values_of_bags.requires_grad_(values.requires_grad), weights_of_bags, lengths)


def _like(
    value: KeyedJaggedTensor | JaggedTensor, values: torch.Tensor, weights: torch.Tensor | None, lengths: torch.Tensor
) -> KeyedJaggedTensor | JaggedTensor:
    if isinstance(value, JaggedTensor):
        return JaggedTensor(values, weights, lengths)
    return KeyedJaggedTensor(value.keys(), values, weights, lengths)


def random_state() -> tuple[Any, bytes]:
    """The states of Python's and numpy's random numbers, to be compared."""
    state: Any = numpy.random.get_state()
    kind, words, *rest = state
    return (random.getstate(), kind, rest), bytes(words)


@contextlib.contextmanager
def fixed_randomness(seed: int = 0) -> Iterator[None]:
    """Seed torch, numpy and Python inside, and run deterministically; restore their states afterwards."""
    python, array = random.getstate(), numpy.random.get_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            # Uninitialised memory is filled with NaN, so code that reads it (the backward of torchrec's
            # KTRegroupAsDict, for keys in no group) gives the same result each time.
            warnings.filterwarnings("ignore", ".*deterministic.*")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)
        random.setstate(python)
        numpy.random.set_state(array)
