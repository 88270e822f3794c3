"""The process groups of hosts."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from recfx.sharding.dist_groups import DistGroups
from tests.sharding.ranks import ranks


def timeouts(rank: int, world_size: int) -> list[timedelta]:
    whole = dist.new_group(range(world_size), timedelta(seconds=17), "gloo")
    groups = DistGroups.of(ShardingEnv.from_process_group(whole), local_size=world_size)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in (groups.intra, groups.cross)]


def test_a_peer_that_is_gone_is_noticed_in_the_groups_of_hosts_as_soon_as_in_the_whole() -> None:
    assert ranks(2).run(timeouts) == [[timedelta(seconds=17)] * 2] * 2
