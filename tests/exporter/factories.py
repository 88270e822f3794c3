"""Factories for ``python -m recfx export``."""

from __future__ import annotations

from torch import nn

import recfx
from tests.exporter.hashed_models import HASHING, HashedModel, call, trained


def model() -> tuple[nn.Module, recfx.Sample]:
    return trained(), call(6)


def without_sample() -> nn.Module:
    return trained()


def not_converted() -> tuple[nn.Module, recfx.Sample]:
    return HashedModel(), call(6, low=0)


def built() -> tuple[nn.Module, recfx.Sample]:
    """As when saving, with other weights and no ids."""
    return recfx.convert(HashedModel(), hashing=HASHING), call(6)
