"""``recfx.plan``: the same plan everywhere, for pods of NPUs as well, and clear refusals."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ParameterSharding, ShardingPlan

import recfx
from recfx.collections.sharding.plan import read_plan
from recfx.planner.sharder import planned_types
from recfx.planner.topology import HBM_BYTES, check_topology, npu_topology
from recfx.versions.differences import make_topology
from tests.sharding.models import PATHS, Model, collection, fused_collection, sequences
from tests.support.refusals import refused

RAW = recfx.HashConfig(dense_rows=0)
GIB = 1024**3
ENDLESS: Any = float("inf")


def stock(world_size: int = 4, device: str = "cuda", **settings: int) -> Topology:
    return Topology(world_size=world_size, compute_device=device, **settings)


def parameters(plan: ShardingPlan) -> dict[str, ParameterSharding]:
    return {
        f"{path}.{table}": parameter
        for path, module in plan.plan.items()
        for table, parameter in module.items()  # type: ignore[attr-defined]
    }


def placements(plan: ShardingPlan) -> set[str]:
    """The places of all shards; torch calls the device ``npu`` where torch_npu is there."""
    names = set()
    for parameter in parameters(plan).values():
        if parameter.sharding_spec is not None:
            names |= {str(shard.placement) for shard in parameter.sharding_spec.shards}
    return {name.replace("privateuseone", "npu") for name in names}


def converted(device: str) -> nn.Module:
    return recfx.convert(Model(device), hashing=RAW)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("make", [Model, converted], ids=["standard", "converted"])
@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_plans_every_table(kind: str, make: Callable[[str], nn.Module], device: str) -> None:
    model = make(device)
    before = {name: (parameter, parameter.device) for name, parameter in model.named_parameters()}
    plan = recfx.plan(model, npu_topology(4, 2) if kind == "npu" else stock(device=kind))
    tables = {f"{path}.{prefix}{number}" for path, prefix in PATHS.items() for number in range(3)}
    assert parameters(plan).keys() == tables
    assert {parameter.compute_kernel for parameter in parameters(plan).values()} <= {"fused", "dense"}
    per_host = 2 if kind == "npu" else 4
    expected = {
        f"rank:{rank}/{kind}" if kind == "cpu" else f"rank:{rank}/{kind}:{rank % per_host}" for rank in range(4)
    }
    assert placements(plan) <= expected
    assert before == {name: (parameter, parameter.device) for name, parameter in model.named_parameters()}


# Its hashes are other ones, and its root logger has no handler.
IN_ANOTHER_PROCESS = """
import logging
from torch import nn
from recfx.versions.differences import make_topology
import recfx
from recfx.planner.topology import npu_topology
from tests.builders.collections import tables_named
from tests.planner.test_plan import plan_of_some_types

model = nn.ModuleDict({"ebc": tables_named("a", "b", "c")})
logging.getLogger().handlers.clear()
for topology in (npu_topology(2), make_topology(2, "cuda")):
    recfx.plan(model, topology)
print(plan_of_some_types())
assert logging.getLogger().handlers == []
"""


def plan_of_some_types() -> ShardingPlan:
    types = ["row_wise", "table_wise", "table_row_wise"]
    limits = {f"p{number}": ParameterConstraints(sharding_types=types) for number in range(3)}
    return recfx.plan(Model(), make_topology(world_size=4, compute_device="cuda"), limits)


def test_in_another_process() -> None:
    """The plan is the same, and planning says nothing."""
    environment = {name: value for name, value in os.environ.items() if name == "RECFX_BUILD_DIR"}  # nothing compiles
    environment |= {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-W", "always", "-c", IN_ANOTHER_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "planner" in line or "Sharding spec" in line] == []
    assert done.stdout.strip() == str(plan_of_some_types()).strip()


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_what_does_not_fit(kind: str) -> None:
    big = nn.ModuleDict({"ebc": collection("t", rows=2**30)})  # 1.5 TiB
    topology = npu_topology(8) if kind == "npu" else stock(8, hbm_cap=HBM_BYTES)
    with refused("plan_does_not_fit"):
        recfx.plan(big, topology)
    assert len(parameters(recfx.plan(big, npu_topology(64)))) == 3


def test_the_memory_of_indexes_counts() -> None:
    """Indexes of 4 GB in all do not go into hosts with 1 GB a rank; without them the tables do."""
    model = nn.ModuleDict({"ebc": collection("t", rows=2**24, dim=16)})
    hashed = recfx.convert(model, hashing=RAW)
    for topology in (stock(2, ddr_cap=1 * GIB, hbm_cap=16 * GIB), npu_topology(2, ddr_cap=1 * GIB)):
        assert len(parameters(recfx.plan(model, topology))) == 3
        with refused("plan_does_not_fit"):
            recfx.plan(hashed, topology)
    assert len(parameters(recfx.plan(hashed, npu_topology(2, ddr_cap=8 * GIB)))) == 3


def test_dense_kernels_are_data_parallel() -> None:
    plan = recfx.plan(Model(), stock(), {"p0": ParameterConstraints(compute_kernels=["dense"])})
    sharding = parameters(plan)["plain.p0"]
    assert (sharding.sharding_type, sharding.compute_kernel) == ("data_parallel", "dense")


@pytest.mark.parametrize(
    "limits",
    [
        ParameterConstraints(compute_kernels=["fused_uvm"]),
        ParameterConstraints(compute_kernels=["dense"], sharding_types=["row_wise"]),
        ParameterConstraints(sharding_types=["rowwise"]),
        ParameterConstraints(device_group="cpu"),
    ],
)
def test_constraints_that_leave_nothing(limits: ParameterConstraints) -> None:
    with refused("no_sharding_option", "part.weighted", match="'w1'"):
        recfx.plan(Model(), stock(), {"w1": limits})


def small(rows: int, hashing: recfx.HashConfig | None) -> nn.Module:
    return recfx.convert(collection("t", rows=rows), hashing=hashing)


def test_rows_of_a_plan_are_as_they_are_cut() -> None:
    """Buckets stay whole: three of them on two ranks are one and two."""
    constraints = {f"t{n}": ParameterConstraints(sharding_types=["row_wise"]) for n in range(3)}
    hashed = small(90, recfx.HashConfig(dense_rows=0, buckets=3))
    plan = recfx.plan(hashed, stock(2), constraints)
    read = read_plan(hashed.tables, plan.plan[""], 0, 2)
    assert [table.row_borders() for table in read.tables] == [[0, 30, 90], [0, 60, 180], [0, 90, 270]]


@pytest.mark.parametrize(
    ("rows", "hashing"), [(90, recfx.HashConfig(dense_rows=0, buckets=1)), (3, None)], ids=["one bucket", "three rows"]
)
def test_no_plan_leaves_ranks_without_rows(rows: int, hashing: recfx.HashConfig | None) -> None:
    model = small(rows, hashing)
    constraints = {"t0": ParameterConstraints(sharding_types=["row_wise", "table_wise"])}
    assert recfx.plan(model, stock(4), constraints).plan[""]["t0"].sharding_type == "table_wise"
    limits = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    with refused("no_sharding_option", match="row_wise"):
        recfx.plan(model, stock(4), limits)
    assert recfx.plan(model, stock(4), limits, empty_ranks=True).plan[""]["t0"].sharding_type == "row_wise"


@pytest.mark.parametrize(("ranks", "per_host"), [(3, 2), (6, 4), (5, 8)])
def test_hosts_that_do_not_have_equally_many_ranks(ranks: int, per_host: int) -> None:
    model, topology = small(90, None), Topology(ranks, "cpu", local_world_size=per_host)
    assert recfx.plan(model, topology).plan[""]["t0"].sharding_type in ("table_wise", "data_parallel", "column_wise")
    limits = ParameterConstraints(sharding_types=["table_row_wise"])
    with refused("no_sharding_option", match="table_row_wise"):
        recfx.plan(model, topology, {"t0": limits})


def test_refusals() -> None:
    with refused("unknown_table", match="'misspelt'"):
        recfx.plan(Model(), stock(), {"misspelt": ParameterConstraints()})
    with refused("no_sharding_option", match="on mtia"):
        recfx.plan(Model(), stock(device="mtia"))
    with refused("no_collection"):
        recfx.plan(nn.Linear(2, 2), stock())
    with refused("invalid_argument", match="topology is an int"):
        recfx.plan(Model(), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: npu_topology(12),
        lambda: npu_topology(8, hbm_cap=-1),
        lambda: npu_topology(8, inter_host_bandwidth=float("nan")),
        lambda: npu_topology(True),
        lambda: check_topology(stock(0)),
        lambda: check_topology(stock(2, hbm_cap=ENDLESS)),
    ],
)
def test_impossible_pods(make: Callable[[], object]) -> None:
    with refused("invalid_topology"):
        make()


def test_a_pod_as_torchrec_sees_it() -> None:
    pod = npu_topology(16)
    assert (pod.world_size, pod.local_world_size, pod.compute_device) == (16, 8, "cuda")
    assert pod.devices[0].storage.hbm == 64 * GIB
    assert pod.hbm_mem_bw == pytest.approx(1.6e9)  # bytes a millisecond
    assert pod.intra_host_bw / pod.inter_host_bw == pytest.approx(392 / 25)
    assert npu_topology(4).local_world_size == 4


def test_what_recfx_does_not_shard_is_planned_where_torchrec_can_run_it() -> None:
    model = nn.ModuleDict({"pooled": collection("t"), "fused": fused_collection("e")})
    assert recfx.plan(model, stock()).plan.keys() == {"pooled", "fused"}
    assert recfx.plan(model, npu_topology(4)).plan.keys() == {"pooled"}


@pytest.mark.parametrize(
    ("sharding_type", "kind"),
    [(name, ("cpu", "cuda", "npu")[number % 3]) for number, name in enumerate(planned_types())],
)
def test_every_type_of_sequence_tables_is_planned(sharding_type: str, kind: str) -> None:
    limits = {f"q{n}": ParameterConstraints(sharding_types=[sharding_type], min_partition=64) for n in range(3)}
    model = nn.ModuleDict({"sequence": sequences("q", dim=256), "pooled": collection("p")})
    topology = npu_topology(16) if kind == "npu" else stock(4, kind, local_world_size=2)
    plan = recfx.plan(model, topology, limits)
    assert {table.sharding_type for table in plan.plan["sequence"].values()} == {sharding_type}
    assert plan.plan["pooled"].keys() == {"p0", "p1", "p2"}
    assert plan.seconds > 0


WRONG: dict[str, Any] = {"pooling_factors": [1.0, -1.0], "batch_sizes": [0], "min_partition": -1}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"model": None}, "model is"),
        ({"constraints": 5}, "constraints is an int"),
        ({"constraints": {"wide": 5}}, "constraints of table 'wide' are 5"),
        ({"batch_size": -1}, "batch_size is -1"),
        *(
            ({"constraints": {"p0": ParameterConstraints(**{name: value})}}, f"{name} of table 'p0' is")
            for name, value in WRONG.items()
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], match: str) -> None:
    passed = {"model": Model("meta"), "topology": npu_topology(8), **arguments}
    with refused("invalid_argument", match=match, error=recfx.RecfxError):
        recfx.plan(**passed)
