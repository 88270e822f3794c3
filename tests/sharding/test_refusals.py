"""What sharded state, checkpoints and plans are refused for, where no other test comes by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from tests.sharding.cases import Case, Table, build, shard_converted
from tests.sharding.pipelined import CPU, PIPELINES, batches_of_rank, dense_optimizer, sharded_model
from tests.sharding.ranks import ranks

CASE = Case((Table("a", 8, 4, ("f0",)), Table("b", 6, 4, ("f1",), "MEAN", ("row_wise",))))
HASHED = Case(CASE.tables, hashing=recfx.HashConfig(dense_rows=0, rows=24, buckets=2), raw_ids=8)


def sharded_over(group: dist.ProcessGroup) -> ShardedHashEmbeddingBagCollection:
    module: ShardedHashEmbeddingBagCollection = shard_converted(CASE, recfx.convert(build(CASE)[0]), 1, group)
    return module


def saved_in_vain(rank: int, world_size: int, folder: str, kind: str) -> tuple[str, str, bool]:
    """Reason and path of the refusal, and whether the folder is as empty as before."""
    if kind == "torchrec":
        plain = nn.ModuleDict({"ebc": EmbeddingBagCollection([CASE.tables[0].config()])})
        model: nn.Module = DistributedModelParallel(plain, device=torch.device("cpu"))
    elif kind == "inside":
        inner = DistributedModelParallel(recfx.convert(build(CASE)[0]), device=torch.device("cpu"))
        model = nn.ModuleDict({"ranker": inner})
    else:
        groups = [dist.group.WORLD, dist.new_group([0])]
        model = nn.ModuleDict({f"ebc{number}": sharded_over(group) for number, group in enumerate(groups)})
    with pytest.raises(recfx.CheckpointError) as caught:
        recfx.save_checkpoint(model, folder)
    return caught.value.reason, caught.value.module_path, not any(Path(folder).iterdir())


@pytest.mark.parametrize(
    ("kind", "reason", "path"),
    [
        ("torchrec", "model_is_sharded", "ebc"),
        ("inside", "model_parallel_inside", "ranker"),
        ("two_groups", "several_process_groups", "ebc1"),
    ],
)
def test_models_that_no_checkpoint_is_made_of(kind: str, reason: str, path: str, tmp_path: Path) -> None:
    ((code, module_path, untouched),) = ranks(1).run(saved_in_vain, str(tmp_path), kind)
    assert (code, untouched) == (reason, True)
    assert module_path.endswith(path)


def load_nothing(rank: int, world_size: int, value: Any) -> tuple[str, str, bool]:
    model = sharded_over(dist.group.WORLD)
    before = [weight.detach().clone() for weight in model.parameters()]
    state = build(Case(CASE.tables, seed=3))[0].state_dict()
    state["embedding_bags.b.weight"] = value
    with pytest.raises(recfx.CheckpointError) as caught:
        model.load_state_dict(state)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return caught.value.reason, caught.value.module_path, same


@pytest.mark.parametrize("value", ["no tensor", torch.empty(6, 4, device="meta")])
def test_a_weight_that_is_none_changes_nothing(value: Any) -> None:
    assert ranks(1).run(load_nothing, value) == [("not_a_tensor", "embedding_bags.b.weight", True)]


def worker_fails(rank: int, world_size: int) -> list[str]:
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
    return answers


def test_an_error_of_the_pipelines_worker_ends_the_group() -> None:
    for answers in ranks(2).run(worker_fails):
        first = answers.index("ValueError")
        assert answers[first + 1 :] == ["OutOfStepError"] * (len(answers) - first - 1) != []
