"""The symbolic collectives of the exchange of ids: the calls that are really made, with their bytes.

``B`` is the batch size of a rank, the same on all ranks; ``L_f`` is the mean length of feature ``f`` in this rank's
batch.
"""

from __future__ import annotations

import sympy

from recfx.ir.meta import BATCH, WORLD, Collective, mean_length
from recfx.ir.shard import Shard

_INT64, _FLOAT32 = 8, 4


def sent_ids(shards: list[Shard]) -> sympy.Expr:
    """The ids that a rank sends to these shards. Cutting a table's rows into pieces does not change their number."""
    features = [feature for shard in _whole(shards) for feature in shard.table.feature_names]
    return BATCH * sympy.Add(*map(mean_length, features))


def _whole(shards: list[Shard]) -> list[Shard]:
    """One shard for every time that a table's ids are sent: the first of the pieces of each block of columns."""
    seen: set[tuple[str, tuple[int, int]]] = set()
    found = []
    for shard in shards:
        block = (shard.table.name, shard.columns)
        if shard.piece < 0 or block not in seen:
            found.append(shard)
        seen.add(block)
    return found


def arriving_ids(shards: list[Shard]) -> sympy.Expr:
    """The ids that all ranks send to these shards of one rank, if all rows are equally likely."""
    terms = []
    for shard in shards:
        share = sympy.Rational(shard.num_rows, shard.table.num_embeddings)
        terms += [share * mean_length(feature) for feature in shard.table.feature_names]
    return WORLD * BATCH * sympy.Add(*terms)


def of_splits(world_size: int) -> tuple[Collective, ...]:
    """``input_dist_start``: the sizes of lengths, ids and weights that follow, a mark, and the batch size."""
    if world_size == 1:
        return ()
    return (Collective("all_to_all", sympy.Integer(5 * world_size * _INT64)),)


def of_ids(shards: list[Shard], world_size: int, is_weighted: bool) -> tuple[Collective, ...]:
    """``input_dist_wait``: lengths and ids, and weights if there are any."""
    bags = sum(len(shard.table.feature_names) for shard in shards)
    return of_sent(bags, sent_ids(shards), world_size, is_weighted)


def of_sent(bags: int, ids: sympy.Expr, world_size: int, is_weighted: bool) -> tuple[Collective, ...]:
    """The collectives that send so many bags per sample of this rank, and so many ids."""
    if world_size == 1:
        return ()
    sizes = [BATCH * bags * _INT64, ids * _INT64] + ([ids * _FLOAT32] if is_weighted else [])
    return tuple(Collective("all_to_all", size) for size in sizes)
