"""Reasons of level warning, which ``convert`` gives as Python warnings, once."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import nn

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.ranks_agree import on_all_ranks
from recfx.collections.wrappers import users_path
from recfx.errors import RecfxWarning, Severity
from recfx.inspect.describe import describe, never_called
from recfx.inspect.report_data import CollectionReport
from recfx.replacement.conversion_record import conversion_of

_PACKAGE = str(Path(__file__).parents[1])


def warn(converted: nn.Module, collections: Mapping[str, ConvertedCollection]) -> None:
    """Warn at the line that called recfx, on rank 0; if the filter makes errors of warnings, on all ranks alike."""
    conversion = conversion_of(converted)
    reasons = [*conversion.notes]
    reasons += [never_called(one.paths[0]) for one in conversion.found if one.found == "never called"]
    for path, collection in collections.items():
        reasons += describe(CollectionReport((path,), "", ""), collection, existed=False, for_warnings=True).reasons
    sharded = next((one for one in collections.values() if isinstance(one, ShardedCollection)), None)
    reasons = [reason for reason in reasons if reason.severity == Severity.WARNING]
    warned = [replace(reason, path=users_path(converted, reason.path)) for reason in reasons]
    if sharded is not None:
        of_ranks = on_all_ranks(sharded.process_group, lambda: warned, lambda error: None)
        warned = [reason for of_rank in of_ranks for reason in of_rank or ()]
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    for reason in warned:
        if (reason.code, reason.path) not in conversion.warned:
            conversion.warned.add((reason.code, reason.path))
            with contextlib.nullcontext() if is_first else warnings.catch_warnings(record=True):
                warnings.warn(RecfxWarning(reason), stacklevel=_frames_of_recfx())


def _frames_of_recfx() -> int:
    """The ``stacklevel`` of the first frame outside recfx, for a warning that the caller of this gives."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
