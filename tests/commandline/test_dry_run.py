"""Plans as files."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.types import ParameterSharding, ShardingPlan

import recfx
from recfx.commandline.main import main
from recfx.planner.plan_file import plain_plan, read_plan, write_plan
from recfx.planner.priced_plan import PricedPlan
from recfx.planner.topology import hardware_of, npu_topology
from recfx.versions.differences import make_topology
from tests.inspect.models import dlrm

DLRM = "tests.inspect.models:dlrm"
PATH = "sparse_arch.embedding_bag_collection"
ON_16 = make_topology(16, "cpu")


@functools.cache
def good_plan() -> ShardingPlan:
    return recfx.plan(dlrm()[0], ON_16)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(good_plan(), file)
    plan = read_plan(file)
    assert (plan.plan, plan.world_size) == (good_plan().plan, 16)
    assert str(plan) == str(good_plan())
    assert hardware_of(plan.topology) == hardware_of(ON_16)
    for options, code in (({"enforce_hbm": True}, "unsupported_plan_option"), ({}, None)):
        plan.plan[PATH]["t0"] = ParameterSharding("table_wise", "fused", [0], None, **options)
        if code is None:
            write_plan(PricedPlan(plan.plan, 3), file)
            assert read_plan(file).world_size == 3
        else:
            with pytest.raises(recfx.ConversionError, match=rf"^\[{code}\] .*t0.*enforce_hbm"):
                write_plan(plan, file)


@pytest.mark.parametrize("topology", [npu_topology(4, hbm_cap=2**34), make_topology(4, "cuda", inter_host_bw=2e7)])
def test_a_plan_that_was_read_is_priced_for_what_it_was_made_for(topology: Any, tmp_path: Path) -> None:
    model, file = dlrm()[0], tmp_path / "plan.json"
    made = recfx.plan(model, topology)
    write_plan(made, file)
    read = read_plan(file)
    assert str(recfx.compare_plans(model, [read, read])) == str(recfx.compare_plans(model, [made, made]))
    assert recfx.cost(model, plan=read).at(64, W=2).hardware == recfx.cost(model, plan=made).at(64, W=2).hardware


def changed(change: Any) -> str:
    """The text of a good plan, after a change of its content; a text is what it is."""
    if isinstance(change, str):
        return change
    content = plain_plan(good_plan())
    change(content, content["collections"][PATH]["t0"])
    return json.dumps(content)


BAD_PLANS = {
    "torn": ('{"version": "1", "world_size": 16, "coll', "JSONDecodeError"),
    "other version": (lambda plan, _: plan.update(version="9"), "version is '9', not '1'"),
    "ranks as text": (lambda plan, _: plan.update(world_size="16"), "world_size is '16'"),
    "unknown key": (lambda _, table: table.update(kernel=1), f"{PATH}.t0 cannot be: "),
    "a shard that is none": (lambda _, table: table.update(shards=[3]), f"{PATH}.t0 cannot be: "),
    "unknown device": (
        lambda _, table: table.update(shards=[{"offsets": [0, 0], "sizes": [1, 1], "placement": "rank:0/gpu"}]),
        f"{PATH}.t0 cannot be: ",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD_PLANS.values(), ids=list(BAD_PLANS))
def test_a_bad_file_is_one_clear_error(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(changed(content))
    assert main(["explain", DLRM, "--plan", str(file)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"python -m recfx explain: [invalid_file] {file}: ")
    assert message in shown.err
    assert " What to do: " in shown.err
    assert shown.err.count("\n") == 1


def test_a_plan_for_other_ranks(tmp_path: Path) -> None:
    write_plan(good_plan(), tmp_path / "plan.json")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["explain", DLRM, "--ranks", "4", "--plan", str(tmp_path / "plan.json")])


def test_tables_that_fit_no_machine_can_be_on_meta() -> None:
    """A dry run of a model on meta allocates neither tables nor indexes."""
    table = EmbeddingBagConfig(name="t", num_embeddings=2**33, embedding_dim=64, feature_names=["f"])
    model = nn.Sequential(EmbeddingBagCollection([table], device=torch.device("meta")))
    report = recfx.explain(model, topology=make_topology(64, "cpu"), hashing=recfx.HashConfig.raw_ids(rows=2**34))
    assert report.ok, str(report)
    assert report.collections[0].tables[0].rows == 2**34
    assert model[0].embedding_bags["t"].weight.shape == (2**33, 64)
