"""Pictures of models as plans would shard them, over ranks that are not there."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.errors import ConversionError, DrawingError, InputError
from recfx.inspect.drawing.costs import TIME
from recfx.planner.pricing.hardware import ASCEND_910B, CPU_HOST, HardwareName
from recfx.planner.topology import NpuTopology, npu_topology
from recfx.versions.differences import make_topology
from tests.builders.collections import tables_named
from tests.drawing.page_data import data_of, text_of, value_of
from tests.inspect.models import dlrm
from tests.support.fake_group import fake_group

RAW = recfx.HashConfig(dense_rows=0)


class Model(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.ebc = tables_named("a", "b", **config)


def plan_of(ebc: EmbeddingBagCollection, world_size: int, **sharding: Any) -> ShardingPlan:
    """Over hosts of two ranks."""
    tables = construct_module_sharding_plan(ebc, sharding, local_size=2, world_size=world_size, device_type="cpu")
    return ShardingPlan({"ebc": tables})


def drawn(model: nn.Module, folder: Path, *arguments: Any, **named: Any) -> str:
    recfx.draw(model, folder / "model.html", *arguments, **named)
    return text_of(folder / "model.html")


def nodes_of(folder: Path) -> list[dict[str, Any]]:
    """The nodes of the page that was drawn last, in all steps."""
    return [{**node, "cost": 0} for node in data_of(folder / "model.html")["nodes"]]


SHARDINGS = {
    "table_wise": table_wise(rank=0),
    "row_wise": row_wise(),
    "column_wise": column_wise(ranks=[0, 1]),
    "table_row_wise": table_row_wise(host_index=0),
    "grid_shard": grid_shard(host_indexes=[0, 1]),
    "data_parallel": data_parallel(),
}


@pytest.mark.parametrize("hashed", [False, True], ids=["static", "hashed"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_equals_the_picture_of_a_sharded_model(sharding: str, hashed: bool, tmp_path: Path) -> None:
    """The picture of the same ranks as it is drawn in a process group."""
    model = Model(dim=256)
    if hashed:
        model = recfx.convert(model, hashing=RAW, verify=False)
    plan = plan_of(Model(dim=256).ebc, 4, a=SHARDINGS[sharding], b=table_wise(rank=3))
    planned = drawn(model, tmp_path, plan=plan, world_size=4)
    nodes = nodes_of(tmp_path)
    with fake_group(0, 4) as group:
        env = ShardingEnv.from_process_group(group)
        drawn(recfx.convert(copy.deepcopy(model), plan=plan, env=env), tmp_path)
        assert nodes == nodes_of(tmp_path)
        assert drawn(model, tmp_path, plan=plan, world_size=4) == planned
    assert "output_dist" in planned or sharding == "data_parallel"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"topology": 8}, "invalid_argument"),
        ({"topology": "H100"}, "invalid_argument] topology is 'H100' (did you mean 'h100'?"),
        ({"topology": npu_topology(8), "plan": {}}, "invalid_argument"),
        ({"world_size": 8}, "invalid_argument"),
        ({"topology": npu_topology(8), "world_size": 0}, "invalid_argument"),
        ({"topology": npu_topology(8), "world_size": True}, "invalid_argument"),
        ({"plan": ShardingPlan({"other": {}}), "world_size": 1}, "plan_unknown_collection"),
        ({"plan": ShardingPlan({}), "world_size": 1}, "plan_missing_collection"),
    ],
)
def test_refusals(arguments: dict[str, Any], reason: str, tmp_path: Path) -> None:
    file = tmp_path / "model.html"
    file.write_text("as it was")
    with pytest.raises((DrawingError, ConversionError, InputError)) as caught:
        recfx.draw(dlrm()[0], file, **arguments)
    assert str(caught.value).startswith(f"[{reason}")
    assert file.read_text() == "as it was"
    assert not dist.is_initialized()


def test_what_has_ranks_already_is_refused(tmp_path: Path) -> None:
    model = Model()
    plan = plan_of(model.ebc, 2, a=row_wise(), b=row_wise())
    with fake_group(0, 2) as group:
        sharded = recfx.convert(model, plan=plan, env=ShardingEnv.from_process_group(group))
    whole = recfx.convert(*dlrm(), whole_graph=True, verify=False)
    for own in (sharded, recfx.convert(Model(), verify=False).ebc.graph_module, whole):
        with pytest.raises(DrawingError, match=r"^\[already_sharded\]"):
            drawn(own, tmp_path, npu_topology(8))
    with pytest.raises(ConversionError, match=r"^\[no_collection\]"):
        drawn(nn.Linear(2, 2), tmp_path, npu_topology(8))


class WithSequence(Model):
    """Beside the collection, one that TorchRec can shard and recfx does not convert."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="s", embedding_dim=4, num_embeddings=10, feature_names=["s"])
        self.sequence = EmbeddingCollection([config])
        self.sequence.embeddings[config.name].max_norm = 1.0  # for which no collection is converted


def test_modules_that_recfx_does_not_shard_stay_as_they_are(tmp_path: Path) -> None:
    topology = make_topology(4, "cpu")
    assert recfx.plan(WithSequence(), topology).plan.keys() == {"ebc", "sequence"}
    model = recfx.convert(WithSequence(), verify=False, on_unsupported="keep")
    for drawn_model in (model, WithSequence()):
        assert "rank 0 of 4 as planned" in drawn(drawn_model, tmp_path, topology)
        assert recfx.cost(drawn_model, topology).world_size == 4
    with fake_group(0, 1) as group:
        sharded: Any = recfx.convert(model, env=ShardingEnv.from_process_group(group), on_unsupported="keep")
    assert sharded.ebc.is_sharded
    assert type(sharded.sequence) is EmbeddingCollection


@pytest.mark.parametrize("trains", [True, False], ids=["training", "eval"])
def test_a_step_has_one_number_wherever_it_is_shown(trains: bool, tmp_path: Path) -> None:
    """Hardware, batch and lengths are the same everywhere, with a sample and without, and stand beside the number."""
    model, sample = dlrm()
    model = recfx.convert(model, hashing=RAW, verify=False).train(trains)
    for given in (None, sample):
        recfx.draw(model, tmp_path / "model.html", sample=given)
        shown, at = data_of(tmp_path / "model.html")["costs"], recfx.cost(model, sample=given).at()
        first, *named = shown["lengths"].split(", ")
        lengths = dict.fromkeys(shown["features"], float(first)) | {
            name: float(length) for name, length in (part.split("=") for part in named)
        }
        assert (shown["hardware"], shown["B"], lengths) == (at.hardware.label, at.batch, pytest.approx(at.lengths))
        formulas = [formula for node in shown["nodes"] for name, _, formula in node["amounts"] if name == TIME]
        total = sum(value_of(formula, shown["B"], 1, [*lengths.values()]) for formula in formulas)
        assert total == pytest.approx(at.seconds)
        assert {at.hardware.name, f"B={at.batch}", "L"} <= set(re.findall(r"[^\s,:)]+", repr(at)))
    plan = recfx.plan(model, make_topology(2, "cpu"))
    assert plan.seconds == pytest.approx(recfx.cost(model, plan=plan).at().seconds)
    assert plan.price in " ".join(str(recfx.explain(model, plan=plan)).split())
    assert f"step {'' if trains else 'in eval mode '}on CPU, B=512 per rank, L: 1; the runner-up" in repr(plan)


def test_a_page_planned_for_npus_shows_their_nodes_and_kernels(tmp_path: Path) -> None:
    """Ids are copied to the host to be exchanged and hashed, and rows back to the NPU."""
    model = recfx.convert(Model(rows=64), hashing=recfx.HashConfig(dense_rows=0, buckets=8), verify=False)
    plan = plan_of(model.ebc, 4, a=row_wise(), b=row_wise())
    recfx.draw(model, tmp_path / "model.html", npu_topology(4), plan=plan)
    data = data_of(tmp_path / "model.html")
    (one,) = data["collections"]
    assert one["device"] == "npu"
    last = [data["nodes"][place] for place in one["steps"][-1]["nodes"]]
    nodes = [(node["kind"], node["device"], node.get("kernel", "")) for node in last if node["kind"] != "item"]
    assert nodes == [
        ("select_features", "npu", ""),
        ("to_host", "cpu", ""),
        ("bucketize", "cpu", ""),
        ("input_dist_start", "cpu", ""),
        ("input_dist_wait", "cpu", ""),
        ("hash_ids", "cpu", ""),
        ("to_device", "npu", ""),
        ("lookup", "npu", "npu[vendor]"),
        ("output_dist_start", "npu", ""),
        ("output_dist_wait", "npu", ""),
        ("keyed_tensor", "npu", ""),
    ]
    (lookup,) = (node for node in last if node["kind"] == "lookup")
    assert lookup["why"][0] == "npu[vendor]: the first that can serve these tables"
    assert lookup["why"][1].startswith("not cpu: the tables are on npu")
    names = [step["name"] for step in one["steps"]]
    assert names == [pass_.name for pass_ in recfx.passes()]


@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [
        ({}, {"cpu"}),
        ({"topology": CPU_HOST}, {"cpu"}),
        ({"topology": ASCEND_910B}, {"npu[vendor]"}),
        ({"topology": "h100"}, {"triton[gpu]"}),
        ({"topology": npu_topology(2)}, {"npu[vendor]"}),
        ({"topology": make_topology(2, "cpu")}, {"cpu"}),
        ({"topology": make_topology(2, "cuda")}, {"triton[gpu]"}),
    ],
    ids=["no times", "host", "npu", "gpu", "planned for npus", "planned for hosts", "planned for gpus"],
)
def test_no_kernel_is_shown_beside_times_of_another_device(
    arguments: dict[str, Any], kernels: set[str], tmp_path: Path
) -> None:
    page = tmp_path / "model.html"
    is_planned = isinstance(arguments.get("topology"), (Topology, NpuTopology))
    recfx.draw(Model() if is_planned else recfx.convert(Model()), page, **arguments)
    data = data_of(page)
    nodes = [data["nodes"][place] for one in data["collections"] for place in one["steps"][-1]["nodes"]]
    assert {node.get("kernel", "") for node in nodes if node["kind"] == "lookup"} == kernels


@pytest.mark.parametrize("name", ["ascend_910b", "h100"])
def test_a_page_of_one_device_has_its_graph(name: HardwareName, tmp_path: Path) -> None:
    model = recfx.convert(Model(), hashing=RAW, verify=False)
    recfx.draw(model, tmp_path / "model.html", name)
    data, cost = data_of(tmp_path / "model.html"), recfx.cost(model, name)
    nodes = [data["nodes"][place] for one in data["collections"] for place in one["steps"][-1]["nodes"]]
    assert [node["name"] for node in nodes] == [node.name for node in cost.nodes if node.kind != "dense"]
    assert {one["device"] for one in data["collections"]} == {cost.device}
    assert "to_host" in {node["kind"] for node in nodes}
    assert data["costs"]["note"] == ""
