"""torch's ``AveragedModel`` averages row by row, but a row of a table with an index belongs to one id after another."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn
from torch.optim.swa_utils import AveragedModel

from recfx.collections.converted_collection import converted_collections
from recfx.collections.wrap_once import wrap_once
from recfx.errors import ConversionError


def refuse_averaging() -> None:
    """Let ``AveragedModel`` refuse tables with an index; called once by ``first_use``, and idempotent."""
    wrap_once(AveragedModel, "update_parameters", _refusing)


def _refusing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def extended(averaged: AveragedModel, model: nn.Module) -> None:
        for path, collection in converted_collections(model).items():
            if collection.tables_with_index():
                raise ConversionError(
                    "AveragedModel averages row by row, but a row of a table with an index belongs to one id after "
                    "another.",
                    reason="averaged_index",
                    module_path=path,
                    what_to_do="average the rest of the model.",
                )
        original(averaged, model)

    return extended
