"""Checks the constraints that a user passes to ``recfx.plan``: what TorchRec would compute with, or fail on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints

from recfx.errors import ConversionError
from recfx.planner.pricing.values import not_negative, whole_number

_LISTS: dict[str, Callable[[Any, str], object] | None] = {
    "pooling_factors": not_negative,
    "num_poolings": not_negative,
    "batch_sizes": whole_number,
    "sharding_types": None,
    "compute_kernels": None,
}


def checked_constraints(constraints: Mapping[str, Any] | None) -> dict[str, ParameterConstraints]:
    """The constraints by table.

    Raises:
        ConversionError: ``invalid_argument``: they are none.
        InputError: ``invalid_argument``: a number in them is none, or is too small.
    """
    by_table = dict(constraints or {})
    for table, limits in by_table.items():
        if not isinstance(limits, ParameterConstraints):
            raise _invalid(f"the constraints of table {table!r} are {limits!r}", "ParameterConstraints of TorchRec")
        if limits.min_partition is not None:
            whole_number(limits.min_partition, f"min_partition of table {table!r}")
        for name, check in _LISTS.items():
            given = getattr(limits, name)
            if given is None and name != "pooling_factors":
                continue
            if not isinstance(given, Iterable) or isinstance(given, str):
                raise _invalid(f"{name} of table {table!r} is {given!r}", "a list, or nothing")
            for value in given:
                if check is not None:
                    check(value, f"one of {name} of table {table!r}")
    return by_table


def _invalid(message: str, instead: str) -> ConversionError:
    return ConversionError(f"{message}.", reason="invalid_argument", what_to_do=f"pass {instead}.")
