"""A table with an index must not train as unsharded replicas: real processes, gloo."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import recfx
from tests.builders.batches import one_bag
from tests.builders.collections import one_table
from tests.support.forkserver import forkserver
from tests.support.ports import free_port
from tests.support.refusals import refused


def replica(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        check_replica(rank)
        gc.collect()  # wrappers that outlive their process group may abort the process
        dist.barrier()  # nor may the rank that keeps the store leave first
        Path(folder, str(rank)).write_text("done")
    finally:
        dist.destroy_process_group()


def check_replica(rank: int) -> None:
    torch.manual_seed(0)
    plain = one_table()
    batch = one_bag(1, 2 + rank)
    adopted = DistributedDataParallel(recfx.convert(plain))
    adopted(batch).values().sum().backward()
    gradient = plain.embedding_bags["t"].weight.grad
    assert gradient[:4, 0].tolist() == [0.0, 1.0, 0.5, 0.5]  # the mean over ranks

    hashed = recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0))
    replicas = DistributedDataParallel(hashed)
    with refused("unsharded_hash_table", match="replicas would diverge"):
        replicas(batch)
    assert len(hashed.index("t")) == 0
    hashed.eval()
    assert bool((hashed(batch).values() == 0).all())  # reading is no harm


def test_indexed_tables_refuse_to_train_as_replicas(tmp_path: Path) -> None:
    forkserver()
    mp.start_processes(replica, args=(free_port(), str(tmp_path)), nprocs=2, start_method="forkserver")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
