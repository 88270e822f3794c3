"""``plans``: twelve plans on two processes, the predicted time of a step of each against the measured one.

Printed are the times of every plan, how far the predictions spread, and the rank correlation (Spearman's) of predicted
and measured times. The latter are those of the fastest quarter of the steps of each plan, which other processes disturb
least. Plans take turns, and the prices are those of a typical host.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.planner.pricing.hardware import CPU_HOST
from tests.bench.harness import Result, of_fastest_quarter, take_turns
from tests.bench.own_process import on_ranks
from tests.bench.setup import Ids, Setup
from tests.bench.sharded import barred_step
from tests.bench.workload import OPTIMIZERS, attach, standard_collection

WORLD_SIZE = 2
TABLES, ROWS = 8, 50_000
OPTIMIZER = OPTIMIZERS[2]


def _kinds() -> dict[str, Callable[[int], Any]]:
    """How each of the plans shards the table of a number; in two of them a rank waits for the other."""
    rows, copies = sharding_plan.row_wise(), sharding_plan.data_parallel()

    def on(rank: int) -> Any:
        return sharding_plan.table_wise(rank=rank)

    halves, quarters, eighths = (sharding_plan.column_wise(ranks=[0, 1] * times) for times in (1, 2, 4))
    return {
        "tables": lambda table: on(table % 2),
        "tables, one in four on the other rank": lambda table: on(int(table % 4 == 3)),
        "tables, all on one rank": lambda table: on(0),
        "tables, one in four copied": lambda table: copies if table % 4 == 3 else on((table + table // 4) % 2),
        "tables, half of them copied": lambda table: copies if table % 2 else on(table // 2 % 2),
        "copies": lambda table: copies,
        "columns in halves": lambda table: halves,
        "columns in quarters": lambda table: quarters,
        "columns in eighths": lambda table: eighths,
        "rows": lambda table: rows,
        "tables and rows": lambda table: rows if table % 2 else on(table // 2 % 2),
        "rows and copies": lambda table: copies if table % 2 else rows,
    }


def run(setup: Setup) -> Iterator[Result]:
    """One step, forward and backward with the fused row-wise Adagrad, from this rank's KJT."""
    sizes = replace(setup, tables=min(setup.tables, TABLES), rows=min(setup.rows, ROWS))
    yield from on_ranks(WORLD_SIZE, _measure, sizes)


def _measure(setup: Setup) -> list[Result]:
    assert dist.group.WORLD is not None
    ids = Ids(setup, "uniform")
    gradient = torch.rand(setup.batch, setup.tables * setup.dim)
    contestants, predicted = [], {}
    for name, kind in _kinds().items():
        model = _model(setup, kind)
        predicted[name] = 1e3 * recfx.cost(model, CPU_HOST).at(setup.batch, L=setup.bag_length).seconds
        contestants.append(barred_step(name, model, ids.batches(), gradient))
    times = take_turns(contestants, setup.iterations, setup.warm_up)
    measured = {name: of_fastest_quarter([*seconds.values()]) for name, seconds in times.items()}
    facts = {**setup.facts("uniform"), "processes": WORLD_SIZE, "optimizer": OPTIMIZER.name}
    facts["threads"] = torch.get_num_threads()
    facts["predicted_spread"] = round(max(predicted.values()) / min(predicted.values()), 3)
    facts["rank_correlation"] = round(spearman(list(predicted.values()), list(measured.values())), 3)
    return [_result(name, times[name], predicted[name], facts) for name in sorted(predicted, key=predicted.__getitem__)]


def _model(setup: Setup, kind: Callable[[int], Any]) -> nn.Module:
    torch.manual_seed(0)
    collection = standard_collection(setup)
    attach(collection, OPTIMIZER)
    converted = recfx.convert(collection, hashing=None, verify=False)
    per_table = {f"table_{table}": kind(table) for table in range(setup.tables)}
    plan = sharding_plan.construct_module_sharding_plan(
        converted,
        per_table,
        sharder=recfx.sharders()[0],
        local_size=WORLD_SIZE,
        world_size=WORLD_SIZE,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return recfx.convert(converted, plan=ShardingPlan({"": plan}), env=env, hashing=None, verify=False)


def _result(name: str, times: dict[int, float], predicted: float, facts: dict[str, Any]) -> Result:
    measured = sorted(times.values())
    low, _, high = statistics.quantiles(measured, n=4)
    return Result(
        name=f"plans/{WORLD_SIZE}",
        ours=name,
        ours_ms=statistics.median(measured),
        peer="predicted",
        peer_ms=predicted,
        quiet_ratio=of_fastest_quarter(measured) / predicted,
        spread=(low / predicted, high / predicted),
        setup=facts,
    )


def spearman(first: list[float], second: list[float]) -> float:
    """The rank correlation of two lists without equal numbers: 1 if they have the same order, -1 if the opposite."""
    places = [torch.tensor(series, dtype=torch.float64).argsort().argsort() for series in (first, second)]
    count = len(first)
    squares = int((places[0] - places[1]).square().sum())
    return 1 - 6 * squares / (count * (count**2 - 1))
