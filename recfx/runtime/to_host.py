"""``to_host``: copies ids from a device to the host, where the indexes are."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime.base import NodeModule
from recfx.runtime.host_copies import HOST, copy_to_host


class ToHost(NodeModule):
    """Copy ids into pinned memory, and wait until they are there.

    Args:
        with_bags: whether the lengths of the bags and the weights of the ids are copied as well, because ranks exchange
            them on the host; otherwise they stay on the device.
    """

    def __init__(self, with_bags: bool = False) -> None:
        super().__init__()
        self.with_bags = with_bags

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features``: ids, with one batch size. Returns int64 ids in the same bags; a batch that is on the host (or
        on meta) is returned as it is.
        """
        if features.values().device.type in HOST:
            return features
        return _all_of(features) if self.with_bags else _ids_of(features)


def _ids_of(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Only the ids, and how many each key has, on the host."""
    copied, stride = [features.values().long()], features.stride()
    length_per_key = features.length_per_key_or_none()
    if length_per_key is None and features.variable_stride_per_key():
        length_per_key = features.length_per_key()
    elif length_per_key is None and stride == 0:
        length_per_key = [0] * len(features.keys())
    elif length_per_key is None:
        copied.append(features.offsets()[::stride])
    ids, *borders = copy_to_host(copied)
    if borders:
        length_per_key = borders[0].diff().tolist()
    return KeyedJaggedTensor(
        features.keys(),
        ids,
        features.weights_or_none(),
        lengths=features.lengths(),
        offsets=features.offsets(),
        stride=stride,
        length_per_key=length_per_key,
    )


def _all_of(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    if weights is not None and weights.requires_grad:  # the copy gets its gradient
        ids, lengths = copy_to_host([features.values(), features.lengths()])
        weights = weights.to(torch.device("cpu"))
    elif weights is not None:
        ids, lengths, weights = copy_to_host([features.values(), features.lengths(), weights])
    else:
        ids, lengths = copy_to_host([features.values(), features.lengths()])
    return KeyedJaggedTensor(features.keys(), ids, weights, lengths=lengths, stride=features.stride())
