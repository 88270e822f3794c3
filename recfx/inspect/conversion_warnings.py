"""Reasons of level warning, which ``convert`` gives as Python warnings, once."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch.distributed as dist
from torch import nn

from recfx.errors import RecfxWarning, Severity
from recfx.inspect.explain import explain
from recfx.replacement.conversion_record import conversion_of

_PACKAGE = str(Path(__file__).parents[1])


class ConversionWarnings:
    """An observer of one conversion."""

    def __init__(self, model: nn.Module) -> None:
        pass

    def done(self, stage: str) -> None:
        """Nothing is worth a warning yet."""

    def failure(self, error: BaseException) -> None:
        """The error says more."""

    def result(self, converted: nn.Module) -> None:
        """Warn of what the report warns of, on rank 0, at the line that called recfx."""
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return
        warned = conversion_of(converted).warned
        for reason in explain(converted).reasons:
            if reason.severity == Severity.WARNING and (reason.code, reason.path) not in warned:
                warned.add((reason.code, reason.path))
                warnings.warn(RecfxWarning(reason), stacklevel=_frames_of_recfx())


def _frames_of_recfx() -> int:
    """The ``stacklevel`` of the first frame outside recfx, for a warning that the caller of this gives."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
