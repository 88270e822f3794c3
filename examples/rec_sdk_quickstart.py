"""The quick start of Rec SDK Torch on recfx: raw ids, row-wise sharded tables, a training pipeline.

    python examples/rec_sdk_quickstart.py
    torchrun --nproc-per-node 2 examples/rec_sdk_quickstart.py

The steps and the calls are those of its documentation; the names come from ``recfx.compat.hybrid_torchrec``. The data
is different: here ids use all 64 bits, and the labels depend on them, so that there is something to learn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from processes import find_device, print_once, process_group, quiet
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader
from torch.utils.data.dataset import IterableDataset
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recfx.compat.hybrid_torchrec import (
    DistributedModelParallel,
    EmbeddingShardingPlanner,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HybridTrainPipelineSparseDist,
    Topology,
    get_default_hybrid_sharders,
)

FEATURES = {"product": ["phone", "clothes"], "user": ["user"]}  # by table
ROWS, DIM = 10240, 64
BATCH_SIZE, DISTINCT_IDS = 128, 512
OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


# 1. The data
class RandomRecDataset(IterableDataset[Batch]):
    """Batches of raw ids; every id pulls the label to one side."""

    def __init__(self, batches: int, rank: int) -> None:
        super().__init__()
        names = [name for features in FEATURES.values() for name in features]
        world = torch.Generator().manual_seed(0)  # the same ids on every rank
        self.ids = {name: torch.randint(-(2**63), 2**63 - 1, (DISTINCT_IDS,), generator=world) for name in names}
        self.pulls = {name: torch.randn(DISTINCT_IDS, generator=world) for name in names}
        draw = torch.Generator().manual_seed(1 + rank)
        self.data = [self.draw_batch(draw) for _ in range(batches)]

    def draw_batch(self, draw: torch.Generator) -> Batch:
        features, pull = {}, torch.zeros(BATCH_SIZE)
        for name, ids in self.ids.items():
            drawn = torch.randint(DISTINCT_IDS, (BATCH_SIZE,), generator=draw)
            features[name] = JaggedTensor(values=ids[drawn], lengths=torch.ones(BATCH_SIZE).long())
            pull += self.pulls[name][drawn]
        return Batch(torch.empty(BATCH_SIZE, 0), KeyedJaggedTensor.from_jt_dict(features), (pull > 0).float())

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


# 2. The model
class TestModel(torch.nn.Module):
    """Hashed tables and a linear layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            HashEmbeddingBagConfig(name=table, embedding_dim=DIM, num_embeddings=ROWS, feature_names=names)
            for table, names in FEATURES.items()
        ]
        self.ebc = HashEmbeddingBagCollection(device="meta", tables=tables)
        self.linear_net = torch.nn.Linear(DIM * sum(map(len, FEATURES.values())), 1, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.linear_net(self.ebc(batch.sparse_features).values()).squeeze(-1)
        return binary_cross_entropy_with_logits(result, batch.labels), result


# 4. Shards
def create_ddp(model: TestModel, device: torch.device) -> DistributedModelParallel:
    """Cut every table by rows. Ids are sent between the hosts, pooled rows between the devices."""
    host_gp = dist.new_group(backend="gloo")
    host_env = ShardingEnv(world_size=dist.get_world_size(), rank=dist.get_rank(), pg=host_gp)
    hybrid_sharders = get_default_hybrid_sharders(host_env=host_env)
    by_rows = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        constraints=dict.fromkeys(FEATURES, by_rows),
    )
    plan = planner.collective_plan(model, hybrid_sharders, dist.GroupMember.WORLD)
    print_once(plan)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=hybrid_sharders)


def train(device: torch.device, options: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    dataset = RandomRecDataset(options.batches, dist.get_rank())
    loader = DataLoader(dataset, batch_size=None, pin_memory=device.type != "cpu")
    model = TestModel(device)

    # 3. The optimizer of the tables, which runs inside backward
    apply_optimizer_in_backward(OPTIMIZERS[options.optimizer], model.ebc.parameters(), {"lr": 0.05, "eps": 1e-8})

    ddp_model = create_ddp(model, device)

    # 5. That optimizer and the one for the other parameters, combined
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(ddp_model.named_parameters())),
        lambda params: OPTIMIZERS[options.optimizer](params, lr=0.01),
    )
    optimizer = CombinedOptimizer([ddp_model.fused_optimizer, dense_optimizer])

    # 6. The pipeline
    pipeline = HybridTrainPipelineSparseDist(ddp_model, optimizer, device, execute_all_batches=True, return_loss=True)

    # 7. Training
    losses = []
    for _ in range(options.epochs):
        batched_iterator = iter(loader)
        while True:
            try:
                _, loss = pipeline.progress(batched_iterator)
            except StopIteration:
                break
            losses.append(float(loss))
        print_once(f"step {len(losses):3}: loss {sum(losses[-options.batches :]) / options.batches:.4f}")
    return losses


def main() -> int:
    options = parse_arguments()
    device = find_device(options.device)
    quiet()
    torch.manual_seed(0)
    with process_group(device):
        losses = train(device, options)
        print(f"rank {dist.get_rank()}: {len(losses)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
        print_once("demo done")
    return 0 if losses[-1] < losses[0] else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu (default %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few batches, only to see that everything runs")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--batches", type=int, default=20, help="batches per epoch (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    if options.smoke:
        options.batches, options.epochs = 4, 2
    return options


if __name__ == "__main__":
    sys.exit(main())
