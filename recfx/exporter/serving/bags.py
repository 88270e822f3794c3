"""What the nodes of an exported graph pass to each other, and what their modules have in common."""

from typing import NamedTuple, Optional

import torch
from torch import nn


class Bags(NamedTuple):
    """The ids (or rows) of one collection's features, in the collection's order.

    Args:
        values: int64 ``[n]``. A row of -1 adds nothing to its bag, but counts in the bag's length.
        offsets: int64 ``[F * B + 1]``, where the bags begin in ``values``, feature by feature.
        weights: float32 ``[n]`` if the collection is weighted.
        ends: ``F + 1`` numbers, if the host knows them: where the features begin in ``values``, and its end.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    weights: Optional[torch.Tensor]  # noqa: UP045  TorchScript does not compile `X | None` in a NamedTuple
    ends: Optional[list[int]] = None  # noqa: UP045


class ServedNode(nn.Module):
    """A module that a node of an exported graph calls.

    Attributes:
        label: the node's name.
    """

    label: str

    def __init__(self) -> None:
        super().__init__()
        self.label = ""
