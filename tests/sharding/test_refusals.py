"""What sharding refuses, hooks included."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from tests.builders.batches import one_bag
from tests.builders.collections import tables_named
from tests.sharding.cases import Case, Table, build, shard_converted
from tests.sharding.pipelined import CPU, PIPELINES, batches_of_rank, dense_optimizer, sharded_model
from tests.sharding.ranks import on_ranks
from tests.support.needs import needed
from tests.support.refusals import refused

CASE = Case((Table("a", 8, 4, ("f0",)), Table("b", 6, 4, ("f1",), "MEAN", ("row_wise",))))
HASHED = Case(CASE.tables, hashing=recfx.HashConfig(dense_rows=0, rows=24, buckets=2), raw_ids=8)


def sharded_over(group: dist.ProcessGroup) -> ShardedHashEmbeddingBagCollection:
    return shard_converted(CASE, recfx.convert(build(CASE)[0]), 1, group)


@pytest.mark.parametrize(
    ("kind", "reason", "path"),
    [
        ("torchrec", "model_is_sharded", "ebc"),
        ("inside", "model_parallel_inside", "ranker"),
        ("two_groups", "several_process_groups", "ebc1"),
    ],
)
@on_ranks(1)
def test_models_that_no_checkpoint_is_made_of(
    rank: int, world_size: int, kind: str, reason: str, path: str, tmp_path: Path
) -> None:
    if kind == "torchrec":
        plain = nn.ModuleDict({"ebc": EmbeddingBagCollection([CASE.tables[0].config()])})
        model: nn.Module = DistributedModelParallel(plain, device=torch.device("cpu"))
    elif kind == "inside":
        inner = DistributedModelParallel(recfx.convert(build(CASE)[0]), device=torch.device("cpu"))
        model = nn.ModuleDict({"ranker": inner})
    else:
        groups = [dist.group.WORLD, dist.new_group([0])]
        model = nn.ModuleDict({f"ebc{number}": sharded_over(group) for number, group in enumerate(groups)})
    with refused(reason, error=recfx.CheckpointError) as caught:
        recfx.save_checkpoint(model, tmp_path)
    assert caught.value.module_path.endswith(path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["no tensor", torch.empty(6, 4, device="meta")])
@on_ranks(1)
def test_a_weight_that_is_none_changes_nothing(rank: int, world_size: int, value: Any) -> None:
    model = sharded_over(dist.group.WORLD)
    before = [weight.detach().clone() for weight in model.parameters()]
    state = build(Case(CASE.tables, seed=3))[0].state_dict()
    state["embedding_bags.b.weight"] = value
    with refused("not_a_tensor", "embedding_bags.b.weight", error=recfx.CheckpointError):
        model.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@on_ranks(2)
def test_an_error_of_the_pipelines_worker_ends_the_group(rank: int, world_size: int) -> None:
    """A pipeline's steps; what looks rows up on its thread fails once."""
    model = sharded_model(HASHED, world_size, "alone")
    pipeline = PIPELINES["recfx"](model, dense_optimizer(HASHED, model), CPU)
    source = iter(batches_of_rank(HASHED, rank, world_size, 6, "alone"))
    pipeline.progress(source)

    def fail(_: Any) -> None:
        raise ValueError("the index is on fire")

    model.sparse.prefetcher = lambda _: fail  # type: ignore[method-assign, union-attr, assignment]
    answers = []
    for _ in range(4):
        try:
            pipeline.progress(source)
            answers.append("")
        except (ValueError, recfx.RecfxError) as error:
            answers.append(type(error).__name__)
    first = answers.index("ValueError")
    assert answers[first + 1 :] == ["OutOfStepError"] * (len(answers) - first - 1) != []


_TRACKER = "torchrec.distributed.model_tracker"
DeltaTrackerConfig = needed(f"{_TRACKER}.types.DeltaTrackerConfig", "TorchRec 1.5")
ModelDeltaTrackerTrec = needed(f"{_TRACKER}.model_delta_tracker.ModelDeltaTrackerTrec", "TorchRec 1.5")
ModelTrackerConfigs = needed(f"{_TRACKER}.types.ModelTrackerConfigs", "TorchRec 1.5")
RawIdTracker = needed(f"{_TRACKER}.trackers.raw_id_tracker.RawIdTracker", "TorchRec 1.5")
RawIdTrackerConfig = needed(f"{_TRACKER}.types.RawIdTrackerConfig", "TorchRec 1.5")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = tables_named("t")

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.ebc(features)["t"]
        return values.sum()


def parallel(**options: Any) -> Any:
    return DistributedModelParallel(recfx.convert(Model()), device=torch.device("cpu"), **options)


TOOLS: dict[str, Callable[[], Any]] = {
    "delta tracker": lambda: ModelDeltaTrackerTrec(model=parallel(), fqns_to_skip=["other"]),
    "delta tracker of model parallel": lambda: parallel().init_torchrec_delta_tracker(DeltaTrackerConfig()),
    "raw id tracker": lambda: RawIdTracker(parallel()),
    "raw id tracker of model parallel": lambda: parallel(
        model_tracker_configs=ModelTrackerConfigs(raw_id_tracker_config=RawIdTrackerConfig())
    ),
}


@pytest.mark.parametrize("tool", TOOLS)
@on_ranks(1)
def test_a_tool_that_would_be_told_nothing(rank: int, world_size: int, tool: str) -> None:
    with refused("torchrec_hook_not_called") as caught:
        TOOLS[tool]()
    assert "ebc" in caught.value.module_path


@on_ranks(1)
def test_what_skips_converted_collections_and_what_tracks_others(rank: int, world_size: int) -> None:
    """What skips the collections, and what TorchRec's own ones are told."""
    model = parallel()
    assert ModelDeltaTrackerTrec(model, fqns_to_skip=["ebc"]).get_tracked_modules() == {}
    stock = DistributedModelParallel(Model(), device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder()])
    tracker = ModelDeltaTrackerTrec(stock)
    tracker.step()
    stock(one_bag(0, 1, feature="t"))
    assert [name.rpartition("ebc.")[2] for name in tracker.get_unique_ids()] == ["embedding_bags.t"]


@on_ranks(1)
def test_tables_that_would_never_be_synchronised(rank: int, world_size: int) -> None:
    """Its own constructor takes only CUDA; it calls this one."""
    model = recfx.convert(Model())  # whose first use gives TorchRec's classes their checks
    with refused("two_dimensional_parallelism"):
        DistributedModelParallel.__init__(DMPCollection.__new__(DMPCollection), model)
