"""Factories for ``python -m recfx export``."""

from typing import Any

import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.exporter.hashed_models import HASHING, HashedModel, call, trained


def model() -> tuple[nn.Module, recfx.Sample]:
    return trained(), call(6)


def not_converted() -> tuple[nn.Module, recfx.Sample]:
    return HashedModel(), call(6, low=0)


class ByName(HashedModel):
    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc(features=features).values()) + dense


def called_by_name() -> tuple[nn.Module, recfx.Sample]:
    return ByName(), call(6, low=0)


def built() -> tuple[nn.Module, recfx.Sample]:
    """As when saving, with other weights and no ids."""
    return recfx.convert(HashedModel(), hashing=HASHING), call(6)


def on_meta() -> tuple[nn.Module, recfx.Sample]:
    with torch.device("meta"):
        model = HashedModel()
    return recfx.convert(model, hashing=HASHING), call(6)


class WithBuffer(nn.Module):
    """A buffer on meta that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = on_meta()[0]
        self.register_buffer("scale", torch.ones(1, device="meta"), persistent=False)

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.model(*batch) * self.scale


def with_buffer_on_meta() -> tuple[nn.Module, recfx.Sample]:
    return WithBuffer(), call(6)
