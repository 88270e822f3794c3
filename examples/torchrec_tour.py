"""TorchRec's introduction, on a converted model: from a jagged batch to sharded training.

python examples/torchrec_tour.py
torchrun --nproc-per-node 2 examples/torchrec_tour.py
python examples/torchrec_tour.py --device npu:0        # or cuda:0; nothing else changes
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from processes import find_device, in_order, print_once, process_group, quiet, topology
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import LazyAwaitable, ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import recfx
from recfx.ir import format_graph

RAW_IDS = recfx.HashConfig.raw_ids()


class Model(torch.nn.Module):
    """A user's model: two towers, and how well they match."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"{name}_table", num_embeddings=16384, embedding_dim=16, feature_names=[name])
            for name in ("product", "user")
        ]
        self.ebc = EmbeddingBagCollection(tables)
        self.over = torch.nn.Linear(16, 16)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return (pooled["product"] * self.over(pooled["user"])).sum(dim=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the tables: cpu, cuda, npu (default %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few steps, only to see that everything runs")
    options = parser.parse_args()
    steps = 10 if options.smoke else options.steps
    device = find_device(options.device)
    quiet()
    torch.manual_seed(0)
    features = KeyedJaggedTensor(
        keys=["product", "user"],
        values=torch.tensor([101, -(2**63), 7_000_000_000, 42]),
        lengths=torch.tensor([2, 0, 1, 1]),
    ).to(device)
    convert_a_collection(features, device)
    with process_group(device):
        shard_by_hand(features, device)
        shard_with_nothing_else(device)
        section("6. DistributedModelParallel, optimizer of the tables by in_backward")
        model = new_model()
        apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.2, "eps": 1e-8})
        in_backward = train(model, recfx.sharders(), steps, device)
        section("7. DistributedModelParallel, optimizer of the tables by fused_params")
        adagrad = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.2, "eps": 1e-8}
        fused_params = train(new_model(), recfx.sharders(fused_params=adagrad), steps, device)
        section("8. Both ways give the same result")
        print_once(f"in_backward  loss {in_backward[0]:.4f} -> {in_backward[-1]:.4f}")
        print_once(f"fused_params loss {fused_params[0]:.4f} -> {fused_params[-1]:.4f}")
    return 0 if in_backward[-1] < in_backward[0] and fused_params[-1] < fused_params[0] else 1


def convert_a_collection(features: KeyedJaggedTensor, device: torch.device) -> None:
    """The steps on one process."""
    section("1. KeyedJaggedTensor: bags of ids, one feature after another")
    for feature in features.keys():  # noqa: SIM118  # a batch is not a dict
        bags = [bag.tolist() for bag in features[feature].to_dense()]
        print_once(f"{feature:8} bag of each sample: {bags}")

    section("2. EmbeddingBagCollection, and what recfx.convert makes of it")
    standard = Model().ebc
    print_once(f"{type(standard).__name__} takes ids below 16384, one row each; these ids are raw.")
    converted = recfx.convert(standard, hashing=RAW_IDS, device=device)
    pooled = converted(features)
    print_once(f"{type(converted).__name__} gives a {type(pooled).__name__} of {pooled.keys()}:")
    print_once("product:", tuple(pooled["product"].shape), " user:", tuple(pooled["user"].shape))
    print_once("ids of product_table and their rows:", *converted.index("product_table").items())
    print_once(format_graph(converted.graph_module))


def shard_by_hand(features: KeyedJaggedTensor, device: torch.device) -> None:
    """Planner and sharder, and the three stages of a sharded module."""
    section("3. A plan, and a sharded module")
    converted = recfx.convert(Model(), hashing=RAW_IDS)
    plan = recfx.plan(converted, topology(device, dist.get_world_size(), dist.get_world_size()))
    print_once(plan)
    (sharder,) = [sharder for sharder in recfx.sharders() if sharder.module_type is type(converted.ebc)]
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    sharded = sharder.shard(converted.ebc, plan.plan["ebc"], env, device)
    print_once(f"{type(sharded).__name__}:\n{format_graph(sharded.graph_module)}")
    for stage in ("_input_dists", "_lookups", "_output_dists"):  # this rank's, under the same names as in TorchRec
        in_order(f"rank {dist.get_rank()} {stage}: {[type(part).__name__ for part in getattr(sharded, stage)]}")

    section("4. Input dist, lookup, output dist")
    context = sharded.create_context()
    sent = sharded.input_dist(context, features)
    print_once("input_dist:  ", type(sent).__name__)
    arrived = sent.wait().wait()
    bags = {feature: [bag.tolist() for bag in part[feature].to_dense()] for part in arrived for feature in part.keys()}  # noqa: SIM118
    in_order(f"  rank {dist.get_rank()} has bags of all ranks: {bags}")
    looked_up = sharded.compute(context, arrived)
    result = sharded.output_dist(context, looked_up)
    assert isinstance(result, LazyAwaitable)
    print_once("output_dist:  a LazyAwaitable[KeyedTensor]; it waits for the peers when its values are first used:")
    print_once("product:", tuple(result["product"].shape), " user:", tuple(result["user"].shape))
    at_once = sharded(features)
    print_once("the same as sharded(features):", torch.equal(at_once.values(), result.values()))


def shard_with_nothing_else(device: torch.device) -> None:
    """Only a collection and the device are given: plan and sharders are TorchRec's defaults, except on NPUs."""
    section("5. DistributedModelParallel(collection, device=...)")
    collection = recfx.convert(Model().ebc, hashing=RAW_IDS)
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.02})
    parallel = DistributedModelParallel(collection, device=device, plan=plan_for(collection, device))
    print_once("it holds a", type(parallel.module).__name__)
    print_once("its fused optimizer is a", type(parallel.fused_optimizer).__name__)
    print_once(parallel.fused_optimizer)


def plan_for(model: torch.nn.Module, device: torch.device) -> ShardingPlan | None:
    """None, because TorchRec makes a plan if it gets none; but it has no figures for NPUs."""
    if device.type != "npu":
        return None
    return recfx.plan(model, topology(device, dist.get_world_size(), dist.get_world_size()))


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return recfx.convert(Model(), hashing=RAW_IDS)


def train(model: torch.nn.Module, sharders: list[Any], steps: int, device: torch.device) -> list[float]:
    """Train the whole model; the losses of this rank."""
    parallel = DistributedModelParallel(model, device=device, plan=plan_for(model, device), sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=0.01),
    )
    print_once("optimizer of the rest has", list(dense.params))
    optimizer = CombinedOptimizer([parallel.fused_optimizer, dense])
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        features, labels = draw_sample(draw)
        output = parallel(features.to(device))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 10 == 9:
            print_once(f"step {step + 1:3}: loss {sum(losses[-10:]) / 10:.4f}")
    return losses


def draw_sample(draw: torch.Generator, size: int = 256) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Raw ids of 50 products and users; they match if both are even or both are odd."""
    products, users = torch.randint(50, (2, size), generator=draw)
    ids = torch.cat([products, users]) * 0x1234_5678_9ABC_DEF - 2**62  # an odd factor
    features = KeyedJaggedTensor(["product", "user"], ids, lengths=torch.ones(2 * size, dtype=torch.int64))
    return features, (products % 2 == users % 2).float()


def section(title: str) -> None:
    print_once(f"\n\n== {title} {'=' * max(3, 80 - len(title))}\n")


if __name__ == "__main__":
    sys.exit(main())
