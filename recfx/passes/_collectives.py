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
    whole = [shard for shard in shards if shard.piece < 0 or _is_first_piece(shard, shards)]
    return BATCH * sympy.Add(*(mean_length(feature) for shard in whole for feature in shard.table.feature_names))


def _is_first_piece(shard: Shard, shards: list[Shard]) -> bool:
    same = [each for each in shards if each.table is shard.table and each.columns == shard.columns]
    return shard is same[0]


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
    if world_size == 1:
        return ()
    bags = BATCH * sum(len(shard.table.feature_names) for shard in shards)
    ids = sent_ids(shards)
    sizes = [bags * _INT64, ids * _INT64] + ([ids * _FLOAT32] if is_weighted else [])
    return tuple(Collective("all_to_all", size) for size in sizes)
