"""A process group without other processes: sharding itself needs none, and what is sent arrives nowhere."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[dist.ProcessGroup]:
    """This process as one rank of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
