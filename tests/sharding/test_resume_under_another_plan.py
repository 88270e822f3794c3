"""A stock script that is stopped and goes on under another plan, which decides what steps a table.

Without a plan, TorchRec's planner makes small tables data-parallel, and leaves them to the ordinary optimizer.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import LazyAwaitable
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import recfx
from recfx.collections.sharding.gather import gather_tables
from recfx.collections.wrappers import unwrap
from tests.checkpoint.training import KINDS
from tests.sharding.ranks import ranks
from tests.support.pairwise import pairwise

IDS, TABLES, STEPS = 8, ("a", "b"), 2
RAW = recfx.HashConfig.raw_ids(rows=64, buckets=4, seed=3, on_full="evict")
ALONE = ("alone", 0)


class Model(nn.Module):
    """Pooled tables, or sequences of one id."""

    def __init__(self, form: str) -> None:
        super().__init__()
        common: Any = {
            "num_embeddings": IDS,
            "embedding_dim": 8,
            "init_fn": lambda weight: nn.init.constant_(weight, 0.5),  # also of new rows
        }
        if form == "sequence":
            configs = [EmbeddingConfig(name=name, feature_names=[name], **common) for name in TABLES]
            self.sparse: Any = EmbeddingCollection(tables=configs)
        else:
            bags = [EmbeddingBagConfig(name=name, feature_names=[name], **common) for name in TABLES]
            self.sparse = EmbeddingBagCollection(tables=bags)
        self.over = nn.Linear(16, 1, bias=False)

    def rows(self, features: KeyedJaggedTensor) -> torch.Tensor:
        output = self.sparse(features)
        output = output.wait() if isinstance(output, LazyAwaitable) else output
        parts = [output[name] for name in TABLES]
        return torch.cat([part if isinstance(part, torch.Tensor) else part.values() for part in parts], dim=1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return (self.over(self.rows(features)) - torch.arange(2.0)).square().mean()


def build(kind: str, plan: str, form: str, seed: int) -> tuple[Any, Any]:
    """What a user writes; "standard" is without recfx, and an ordinary optimizer for everything."""
    torch.manual_seed(seed)
    model: Any = Model(form)
    optimizer_class, settings = KINDS[kind]
    settings = {**settings, "eps": 1e-3} if kind != "sgd" else settings  # given, as the classes have other defaults
    make: Any = optimizer_class
    if plan == "standard":
        return model, make(model.parameters(), **settings)
    model = recfx.convert(model, hashing=recfx.HashConfig() if form == "adopted" else RAW)
    apply_optimizer_in_backward(optimizer_class, model.sparse.parameters(), settings)
    fused = []
    if plan != "alone":
        options: dict[str, Any] = {}
        if plan != "default":
            constraints = {name: ParameterConstraints(sharding_types=[plan]) for name in TABLES}
            topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
            planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
            sharders: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
            options["plan"] = planner.collective_plan(model, sharders, dist.group.WORLD)
        model = DistributedModelParallel(model, device=torch.device("cpu"), **options)
        fused = [model.fused_optimizer]
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, CombinedOptimizer([*fused, KeyedOptimizerWrapper(dense, lambda params: make(params, **settings))])


def batch(step: int, rank: int, world_size: int, form: str) -> KeyedJaggedTensor:
    """This rank's samples of a batch, which has all ids: dense rules then step the same rows as fused ones."""
    ids = torch.stack([torch.randperm(IDS, generator=torch.Generator().manual_seed(10 * step + n)) for n in (0, 1)])
    ids = (ids.view(2, max(world_size, 1), -1)[:, rank] if step >= 0 else ids).reshape(-1)
    return KeyedJaggedTensor(
        list(TABLES), ids if form == "adopted" else ids * 10**12 - 5, lengths=torch.full((ids.numel(),), 1)
    )


def steps(model: Any, optimizer: Any, first: int, last: int, rank: int, world_size: int, form: str) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(batch(step, rank, world_size, form)).backward()
        optimizer.step()


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Whole weights and states of tables, whoever has them; ``None`` of SGD is left out. Collective."""
    root = unwrap(model)
    state: dict[str, Any] = {}
    ordinary = optimizer.optimizers[-1][1]._optimizer.state
    if root is model:
        for name, fused in root.sparse.fused_optimizers().items():
            state.update({f"{name}.{key}": value for key, value in fused.state.items()})
            state[name] = root.sparse.weight(name).detach()
    else:
        for name, table in gather_tables(root.sparse).items():
            state[name] = table.weight
            of_table = ordinary[root.sparse.weight(name)] if table.optimizer is None else table.optimizer.state
            state.update({f"{name}.{key}": value for key, value in of_table.items()})
    return {key: value.clone() for key, value in state.items() if value is not None}


def part_of_a_run(
    rank: int, world_size: int, kind: str, plan: str, form: str, first: int, folder: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Load, unless it is the first part; some steps; save. State after loading and when saving, and pooled rows."""
    model, optimizer = build(kind, plan, form, seed=first)
    loaded: dict[str, torch.Tensor] = {}
    if first:
        recfx.load_checkpoint(model, folder, optimizer=optimizer)
        loaded = state_of(model, optimizer)
    steps(model, optimizer, first, first + STEPS, rank, world_size, form)
    recfx.save_checkpoint(model, folder, optimizer=optimizer)
    everything = batch(-1, 0, 1, form)
    return loaded, state_of(model, optimizer), unwrap(model).eval().rows(everything).detach()


CHAINS = {
    "two ranks": [("default", 2), ("table_wise", 2), ALONE, ("default", 2), ALONE],
    "one rank": [("default", 1), ALONE, ("default", 1), ("table_wise", 1), ("default", 1)],
    "four ranks": [("default", 2), ("table_wise", 4), ("default", 4), ("table_wise", 2)],
}


@pairwise(kind=KINDS, form=["adopted", "raw", "sequence"], chain=CHAINS)
def test_a_run_goes_on_as_if_it_had_not_stopped(kind: str, chain: str, form: str, tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}
    parts = CHAINS[chain]
    for part, (plan, world_size) in enumerate(parts):
        arguments: Any = (kind, plan, form, part * STEPS, str(tmp_path))
        answers = ranks(world_size).run(part_of_a_run, *arguments) if world_size else [part_of_a_run(0, 0, *arguments)]
        for loaded, _, _ in answers:
            assert loaded.keys() == kept.keys()
            for name, value in loaded.items():
                assert torch.equal(value.view(-1), kept[name].view(-1)), name
        _, kept, pooled = answers[0]
    assert kind == "sgd" or float(kept["a.step"]) == len(parts) * STEPS
    model, optimizer = build(kind, "standard", "adopted", seed=0)
    steps(model, optimizer, 0, len(parts) * STEPS, 0, 1, "adopted")
    torch.testing.assert_close(pooled, model.rows(batch(-1, 0, 1, "adopted")), rtol=1e-4, atol=1e-6)
