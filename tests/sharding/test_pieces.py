"""Where a sharded table's tensors are cut: what fits, and what the error says about cuts that do not."""

from __future__ import annotations

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard

import recfx
from recfx.collections.sharding.plan import read_plan
from recfx.collections.sharding.state import parts_of, weight_pieces, whole_size
from recfx.ir.shards import ShardedTable
from tests.sharding.cases import Case, Table, build, plan_of
from tests.support.fake_group import fake_group


def table_of(sharding: tuple[object, ...], world_size: int, rows: int = 12) -> ShardedTable:
    case = Case((Table("a", rows, 8, ("f0",), "SUM", sharding),))
    converted = recfx.convert(build(case)[0])
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    return read_plan(converted.tables, plan_of(case, converted, world_size), 0, world_size).tables[0]


def test_empty_shards_that_torchrec_lists_do_not_matter() -> None:
    """The table has fewer rows than there are ranks."""
    with fake_group(0, 4) as group:
        pieces = weight_pieces(table_of(("row_wise",), 4, rows=2))
        assert whole_size(pieces) == (2, 8)
        own, second = (ShardMetadata([rank, 0], [1, 8], f"rank:{rank}/cpu") for rank in range(2))
        empty = [ShardMetadata([2, 0], [0, 8], f"rank:{rank}/cpu") for rank in (2, 3)]
        metadata = ShardedTensorMetadata(
            [own, second, *empty], torch.Size((2, 8)), TensorProperties(dtype=torch.float32)
        )
        saved = ShardedTensor._init_from_local_shards_and_global_metadata(
            [TensorShard(torch.full((1, 8), 5.0), own)], metadata, process_group=group
        )
        (part,) = parts_of(saved, pieces, group, "a").values()
    assert torch.equal(part, torch.full((1, 8), 5.0))
