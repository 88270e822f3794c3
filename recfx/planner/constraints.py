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
    wrong = next((value for value in by_table.values() if not isinstance(value, ParameterConstraints)), None)
    if wrong is not None:
        raise ConversionError(
            f"constraints are {constraints!r}.",
            reason="invalid_argument",
            what_to_do="pass a torchrec.distributed.planner.types.ParameterConstraints by the name of each table.",
        )
    for table, limits in by_table.items():
        _check_numbers(limits, f"of the constraints of table {table!r}")
    return by_table


def _check_numbers(limits: ParameterConstraints, whose: str) -> None:
    if limits.min_partition is not None:
        whole_number(limits.min_partition, f"min_partition {whose}")
    for name, check in _LISTS.items():
        given = getattr(limits, name)
        if given is None and name != "pooling_factors":
            continue
        if not isinstance(given, Iterable) or isinstance(given, str):
            of_what = "a number for each feature" if check else "names"
            raise ConversionError(
                f"{name} {whose} is {given!r}.",
                reason="invalid_argument",
                what_to_do=f"pass a list with {of_what}, or leave {name} out.",
            )
        for number, value in enumerate(given):
            if check is not None:
                check(value, f"{name}[{number}] {whose}")
