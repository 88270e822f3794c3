"""What ranks pass to collectives when their batches differ in size: as the nodes do it, call by call.

Expressions are in one batch size for all ranks. A call that sends pooled rows back then passes other numbers of rows,
and a reduce-scatter becomes an all-to-all, because its parts are no longer equally large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from recfx.ir.meta import Collective
from recfx.planner.pricing.values import Values


class Call(NamedTuple):
    """One collective call in numbers.

    Args:
        operation: the operation that runs.
        passed_bytes: what this rank passes to it, its own part included.
        ranks: how many take part.
        across_hosts: whether these are on one host each.
    """

    operation: str
    passed_bytes: float
    ranks: int
    across_hosts: bool


def calls_of(kind: str, collectives: Sequence[Collective], values: Values) -> list[Call]:
    """The collective calls of a node of some kind, in their order."""
    found = []
    for each in collectives:
        operation, passed = each.operation, float(values.number(each.bytes))
        if values.sizes and kind == "output_dist_start":
            is_summed = any(other.operation == "reduce_scatter" for other in collectives)
            operation, passed = _uneven(
                each, is_summed, values.sizes, values.rank, float(values.per_sample(each.bytes))
            )
        found.append(Call(operation, passed, each.ranks or values.world, each.across_hosts))
    return found


def _uneven(call: Collective, is_summed: bool, sizes: Sequence[int], rank: int, per_sample: float) -> tuple[str, float]:
    """The operation that runs, and its bytes.

    Args:
        call: the call as it is for equal batches.
        is_summed: whether its node sums over ranks.
        sizes: of the batches of all ranks.
        rank: this rank.
        per_sample: the bytes for batches of one sample each.
    """
    ranks = call.ranks or len(sizes)
    others = len(sizes) // ranks  # groups of as many ranks
    if call.operation == "all_to_all":
        if call.backward:
            return call.operation, sizes[rank] * per_sample
        receiving = sizes[rank % others :: others] if call.across_hosts else sizes
        return call.operation, sum(receiving) * per_sample / ranks
    if not is_summed:  # an all-gather, which takes equal sizes
        return call.operation, max(sizes) * per_sample
    # Each rank of the group gets the samples of its counterparts in all groups.
    parts = [sum(sizes[place::ranks]) for place in range(ranks)]
    are_equal = len(set(parts)) == 1
    if call.operation == "reduce_scatter":
        return call.operation if are_equal else "all_to_all", sum(sizes) * per_sample / len(sizes)
    own = parts[rank % ranks] * per_sample / others
    return (call.operation, own) if are_equal else ("all_to_all", ranks * own)
