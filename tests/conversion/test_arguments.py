"""Arguments of a wrong type or size: one typed error that names the argument, wherever they are passed."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx import HashConfig, HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.errors import type_of
from tests.builders.batches import batch
from tests.builders.models import Block
from tests.support.refusals import refused
from tests.toys.count_ids import COUNT_IDS

RAW = HashConfig(dense_rows=0)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Block()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("model", [None, 3, "model", [Block()], Block], ids=str)
def test_what_is_no_module(model: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: recfx.explain(model),
        lambda: recfx.convert(model),
        lambda: recfx.unconvert(model),
        lambda: recfx.trace(model, (batch(2),)),
        lambda: recfx.verify(model, Block(), (batch(2),)),
        lambda: recfx.verify(Block(), model, (batch(2),)),
        lambda: recfx.TrainPipeline(model, trained()[1], "cpu"),
    ]
    for call in calls:
        with refused("invalid_argument", match=type_of(model)):
            call()


MEANT: dict[str, tuple[Callable[..., Any], str]] = {
    "convert, config": (lambda _: recfx.convert(Block(), RAW), "sample is a HashConfig, which hashing= takes"),
    "convert, batch": (lambda _: recfx.convert(Block(), plan=(batch(2),)), "plan is a tuple"),
    "verify, order": (lambda _: recfx.verify(Block(), (batch(2),), Block()), "converted is a tuple"),
    "export, swapped": (lambda path: recfx.export(Block(), (batch(2),), path), "sample is a str, which path= "),
    "load_checkpoint, swapped": (lambda path: recfx.load_checkpoint(path, Block()), "model is a str"),
    "save_checkpoint, order": (lambda path: recfx.save_checkpoint(*trained()), "directory is a SGD"),
    "pipeline, order": (lambda _: recfx.TrainPipeline(Block(), "cpu", trained()[1]), "device is a SGD"),
}


@pytest.mark.parametrize("case", MEANT)
def test_arguments_in_another_order(case: str, tmp_path: Path) -> None:
    call, what = MEANT[case]
    with refused("invalid_argument", match=rf"^\[invalid_argument\] {what}", error=recfx.RecfxError):
        call(str(tmp_path / "model.pt"))


LEFT = {"load_checkpoint": {"optimizer"}, "compare_plans": {"B", "L", "sample"}}  # looked at after what is not there
CALLED = [name for name in recfx.__all__ if inspect.isfunction(getattr(recfx, name)) and name != "passes"]


def right(function: Callable[..., Any]) -> dict[str, Any]:
    model, optimizer = trained()
    known = {
        "model": model,
        "model_or_graph": model,
        "original": model,
        "converted": model,
        "optimizer": optimizer,
        "sample": (batch(2),),
        "device": "cpu",
        "rows": 10,
        "tables": [],
        "kind": COUNT_IDS,
        "make": print,
        "path": "nowhere.pt",
        "base": "nowhere.pt",
        "deltas": ["nowhere.delta"],
        "directory": "nowhere",
        "plans": [ShardingPlan({})],
        "topology": Topology(2, "cpu"),
    }
    needed = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    return {one.name: known[one.name] for one in needed}


@pytest.mark.parametrize("name", [*CALLED, "TrainPipeline", "HashIndex", "HashEmbeddingBagCollection",
                                  "HashEmbeddingCollection", "HashConfig"])  # fmt: skip
def test_what_no_parameter_takes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function = getattr(recfx, name)
    for argument in inspect.signature(function).parameters.keys() - LEFT.get(name, {"sample", "L"}):
        with pytest.raises(recfx.RecfxError, match="directory" if argument == "checkpoint" else argument) as caught:
            function(**right(function) | {argument: object()})
        assert caught.value.reason in ("invalid_argument", "invalid_hash_config", "optimizer_not_supported")
    assert list(tmp_path.iterdir()) == []


def test_tables_that_are_named_by_no_strings_or_described_by_no_configs() -> None:
    with refused("invalid_argument"):
        recfx.convert(Block(), hashing={3: HashConfig()})  # type: ignore[dict-item]
    with refused("invalid_table_config"):
        HashEmbeddingBagCollection([HashConfig()])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "settings",
    [{"num_embeddings": 0}, {"num_embeddings": -1}, {"num_embeddings": 1.5}, {"num_embeddings": True},
     {"embedding_dim": 0}, {"embedding_dim": "8"}, {"hashing": "raw"}, {"hashing": {}}, {"hashing": None}],
    ids=str,
)  # fmt: skip
def test_configs_of_tables(settings: dict[str, Any]) -> None:
    rows = numpy.int64(10)
    right: dict[str, Any] = {"name": "t", "num_embeddings": rows, "embedding_dim": 4, "feature_names": ["f"]}
    (field,) = settings
    with refused("invalid_table_config", "t", match=field):
        HashEmbeddingBagConfig(**right | settings)
    config = HashEmbeddingBagConfig(**right)
    assert HashEmbeddingBagCollection([config]).weight("t").shape == (10, 4)
    setattr(config, field, settings[field])  # after it was made
    with pytest.raises(recfx.ConversionError, match=field):
        HashEmbeddingBagCollection([config])


@pytest.mark.parametrize(
    ("device", "reason"),
    [(None, "invalid_argument"), (1.5, "invalid_argument"), ("nowhere", "device_unavailable")],
    ids=str,
)
def test_devices_of_a_pipeline(device: Any, reason: str) -> None:
    with refused(reason, match="device"):
        recfx.TrainPipeline(*trained(), device)


@pytest.mark.parametrize(
    ("world_size", "rank", "named"), [(2, 9, "rank"), (2, -1, "rank"), (2, None, "rank"), (0, 0, "world_size")]
)
def test_environments_without_their_rank(world_size: Any, rank: Any, named: str) -> None:
    env = ShardingEnv.from_local(world_size, rank)
    for call in (recfx.explain, recfx.convert):
        with refused("invalid_argument", match=f"env.{named} is", error=recfx.InputError):
            call(Block(), env=env)


def test_a_pipeline_takes_what_steps_like_an_optimizer() -> None:
    model, optimizer = trained()

    class Wrapped:
        zero_grad, step = optimizer.zero_grad, optimizer.step

    recfx.TrainPipeline(model, Wrapped(), "cpu")
