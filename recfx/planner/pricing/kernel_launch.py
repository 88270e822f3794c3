"""Kernels in Triton that a node launches, and how long they take on an Ascend chip: by a model, nothing was timed.

Where there is no model of the hardware, a node's time follows from its bytes and accesses alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from recfx.kernels.build.chip_model import modelled
from recfx.kernels.build.tiling import chip_named
from recfx.planner.pricing.hardware import ASSUMED, Hardware

_IDS_PER_BAG = 10
"""Kernels were followed over bags of so many ids; other bags are priced as if they had parts of this length."""


class KernelForm(NamedTuple):
    """What is equal for all tables that share a launch.

    Args:
        kernel: the name of the Triton function.
        rule: of the optimizer; ``""``: none.
        dim: columns of a row.
        element_bytes: of one element of the table.
        is_weighted: whether ids carry weights.
    """

    kernel: str
    rule: str
    dim: int
    element_bytes: int
    is_weighted: bool


@dataclass(frozen=True)
class KernelLaunch:
    """The part of one table in a launch; amounts are expressions or numbers.

    Args:
        form: what is launched.
        positions: ids.
        more: bags, or rows that are stepped.
        read_bytes, written_bytes, flops, random_accesses: what a node's time follows from where there is no model.
    """

    form: KernelForm
    positions: Any
    more: Any
    read_bytes: Any
    written_bytes: Any
    flops: Any
    random_accesses: Any

    def mapped(self, change: Callable[[Any], Any]) -> KernelLaunch:
        """This launch with every amount changed."""
        return KernelLaunch(self.form, *map(change, list(vars(self).values())[1:]))

    def seconds(self, hardware: Hardware) -> Any:
        """How long it takes on an Ascend chip, beside the overhead of a launch."""
        per_position, per_more = _seconds_each(self.form, hardware.chip, hardware.memory_bandwidth.value)
        return per_position * self.positions + per_more * self.more


@cache
def _seconds_each(form: KernelForm, chip: str, memory_bandwidth: float) -> tuple[float, float]:
    """How long one position takes, and one bag or stepped row beyond its positions."""
    assumed = replace(ASSUMED, memory_bandwidth=memory_bandwidth, launch=0.0)

    def seconds(positions: int, more: int) -> float:
        kernel, rule, dim, element_bytes, is_weighted = form
        answer = modelled(
            kernel, positions, more, dim, element_bytes, chip_named(chip), assumed, rule, is_weighted
        )  # fmt: skip
        return answer.seconds

    together = 1 if form.rule else _IDS_PER_BAG
    return seconds(1, 0), max(0.0, seconds(together, 1) - seconds(together, 0))
