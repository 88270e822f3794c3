"""The arguments of a traced program: ``torch.export`` takes tensors only, so KJTs are taken apart into tensors.

A KJT becomes int64 ids ``[n]``, int64 lengths ``[F, B]`` and, if the sample had weights, float32 weights ``[n]``. Its
keys are those of the sample, in that order. A jagged tensor becomes values, lengths ``[B]`` and weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.exporter.arguments import Pattern, Signature
from recfx.exporter.flatten_names import identifier
from recfx.exporter.serving.named_inputs import check_lengths
from recfx.runtime.bags import permute_features

_RESERVED = ("device", "pytree", "fx_pytree")
"""Names that the code of a program of ``torch.export`` needs itself."""


def parts_of(leaf: Pattern) -> list[str]:
    """The tensors of an argument: ``""`` for a tensor, else ``"values"``, ``"lengths"`` and perhaps ``"weights"``."""
    return [""] if leaf.kind == "tensor" else ["values", "lengths", *(["weights"] if leaf.is_weighted else [])]


def flat_names(signature: Signature) -> list[str]:
    """The names of the traced program's arguments."""
    names: list[str] = []
    for leaf in signature.leaves():
        for part in parts_of(leaf):
            names.append(identifier(f"{leaf.name}_{part}" if part else leaf.name, [*names, *_RESERVED]))
    return names


def join_tensors(signature: Signature, tensors: Iterator[torch.Tensor]) -> Iterator[Any]:
    """The tensors and KJTs that the model takes, made of the traced program's arguments."""
    for leaf in signature.leaves():
        found = {part: next(tensors) for part in parts_of(leaf)}
        if leaf.kind == "tensor":
            yield found[""]
        elif leaf.kind == "jagged":
            yield JaggedTensor(found["values"], weights=found.get("weights"), lengths=found["lengths"])
        else:
            yield KeyedJaggedTensor(
                list(leaf.keys),
                found["values"],
                found.get("weights"),
                lengths=found["lengths"].reshape(-1),
                stride=found["lengths"].size(1),
            )


def flat_tensors(signature: Signature, leaves: list[Any]) -> list[torch.Tensor]:
    """The traced program's arguments for the tensors and KJTs of one call.

    Raises:
        RuntimeError: a KJT is malformed, or lacks keys or weights; the message ends with a reason code in brackets.
    """
    flat: list[torch.Tensor] = []
    for leaf, value in zip(signature.leaves(), leaves, strict=True):
        if leaf.kind == "tensor":
            flat.append(value)
        elif leaf.kind == "jagged":
            flat += _jagged(leaf, value.values(), value.lengths().view(-1), value.weights_or_none(), (-1,))
        else:
            flat += _keyed(leaf, value)
    return flat


def _keyed(leaf: Pattern, value: KeyedJaggedTensor) -> list[torch.Tensor]:
    keys = value.keys()
    if value.variable_stride_per_key():
        raise RuntimeError(f"{leaf.name}: every feature must have the same number of samples [bad_lengths]")
    for key in leaf.keys:
        if key not in keys:
            raise RuntimeError(f"{leaf.name}: the batch lacks feature {key}; it has {keys} [missing_feature]")
    lengths, weights = value.lengths(), value.weights_or_none()
    if lengths.numel() % max(1, len(keys)):
        raise RuntimeError(f"{leaf.name}: {lengths.numel()} lengths do not fit {len(keys)} features [bad_lengths]")
    batch_size = lengths.numel() // max(1, len(keys))
    if tuple(keys) == leaf.keys:
        return _jagged(leaf, value.values(), lengths, weights, (len(keys), batch_size))
    _jagged(leaf, value.values(), lengths, weights, (len(keys), batch_size))  # before kernels that check nothing
    place = {key: number for number, key in enumerate(keys)}  # of two that are equal, the later one counts
    selected = permute_features(value, [place[key] for key in leaf.keys], list(leaf.keys))
    return _jagged(
        leaf, selected.values(), selected.lengths(), selected.weights_or_none(), (len(leaf.keys), batch_size)
    )


def _jagged(
    leaf: Pattern, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, shape: tuple[int, ...]
) -> list[torch.Tensor]:
    check_lengths(leaf.name, values, lengths)
    flat = [values.long(), lengths.long().reshape(shape)]
    if leaf.is_weighted:
        if weights is None:
            raise RuntimeError(f"{leaf.name}: the batch has no weights for its ids [missing_weights]")
        if weights.numel() != values.numel():
            raise RuntimeError(
                f"{leaf.name}: there are {weights.numel()} weights for {values.numel()} ids [bad_weights]"
            )
        flat.append(weights.reshape(-1).float())
    return flat
