"""Exports a big model, and prints how much memory that took beyond the model, as a share of its size.

Run as a process of its own: ``python -m tests.exporter.memory_worker PATH MEGABYTES KIND QUANTIZE [RANK WORLD STORE]``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder

DIM, TABLES = 64, 2


class Model(nn.Module):
    def __init__(self, rows: int, device: str) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{n}", embedding_dim=DIM, num_embeddings=rows, feature_names=[f"f{n}"])
            for n in range(TABLES)
        ]
        self.sparse = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.over = nn.Linear(TABLES * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.over(self.sparse(features).values())
        return logits


def features(ids: torch.Tensor) -> KeyedJaggedTensor:
    keys = [f"f{n}" for n in range(TABLES)]
    return KeyedJaggedTensor(keys, ids.repeat(TABLES), lengths=torch.ones(TABLES * ids.numel(), dtype=torch.int64))


def build(rows: int, kind: str, rank: int, world: int) -> nn.Module:
    hashing = recfx.HashConfig(dense_rows=0) if kind == "hashed" else recfx.HashConfig()
    if not world:
        model = recfx.convert(Model(rows, "cpu"), hashing=hashing)
    else:
        model = recfx.convert(Model(rows, "meta"), hashing=hashing)
        plan = sharding_plan.construct_module_sharding_plan(
            model.sparse,  # type: ignore[arg-type]
            {f"t{n}": sharding_plan.row_wise() for n in range(TABLES)},
            sharder=HashEmbeddingBagCollectionSharder(),
            local_size=world, world_size=world, device_type="cpu",
        )  # fmt: skip
        for sharding in plan.values():
            sharding.compute_kernel = "fused"
        model = recfx.convert(model, plan=ShardingPlan({"sparse": plan}), device="cpu")
    if kind == "hashed":
        ids = torch.randperm(rows // 2) * 2**20
        model.train()(features(ids[rank :: max(world, 1)]))
    return model.eval()


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(
    path: str, megabytes: str, kind: str, quantize: str, rank: str = "0", world: str = "0", store: str = ""
) -> None:
    options: dict[str, Any] = {} if quantize == "none" else {"quantize": quantize}
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    size = int(megabytes) * 2**20
    model = build(size // (4 * DIM * TABLES), kind, int(rank), int(world))
    sample = features(torch.arange(8))
    recfx.export(build(64, kind, int(rank), int(world)), path, sample, **options)  # loads what an export needs
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = memory("VmRSS")
    recfx.export(model, path, sample, **options)
    print((memory("VmHWM") - before) / size)


if __name__ == "__main__":
    main(*sys.argv[1:])
