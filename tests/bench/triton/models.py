"""``triton/models``: steps and forwards in eval mode of whole models, with what the host launches and waits for.

A model is a collection and a linear layer; tables have Adagrad in backward, and ids follow a power law. Ours is the
adopted model; peers are TorchRec's, with and without ``DistributedModelParallel`` on one rank, one ``embedding_bag`` a
table, and ours under ``DistributedModelParallel`` and with raw ids that all have rows. All give the same outputs.

Times are the host's until the device is done. ``launches`` and ``waits`` are those of one run in torch's profiler,
which counts nothing on the CPU.
"""

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import CannotRun, Contestant, Result, compare, take_turns, wall_clock
from tests.bench.setup import Ids, Setup, embedding_bags
from tests.bench.triton.on_device import machine, sized
from tests.support import without_torchrec

OURS, OURS_IN_DMP, RAW = "recfx, adopted", "recfx in DMP, one rank", "recfx, raw ids"
STANDARD, DMP, PLAIN = "EmbeddingBagCollection", "TorchRec DMP, one rank", "F.embedding_bag a table"
NAMES = (OURS, STANDARD, DMP, OURS_IN_DMP, RAW, PLAIN)
_MOST_ROWS = 200_000  # all models are there at once
_TAKEN = 0.75  # share of the rows that have an id
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


class Model(nn.Module):
    """A collection, or anything that pools, and a linear layer."""

    def __init__(self, ebc: nn.Module, columns: int) -> None:
        super().__init__()
        self.ebc, self.over = ebc, nn.Linear(columns, 1, bias=False)
        nn.init.constant_(self.over.weight, 1 / columns)

    def forward(self, features: Any) -> torch.Tensor:
        pooled = self.ebc(features)
        return self.over(pooled if isinstance(pooled, torch.Tensor) else pooled.values())


class Plain(nn.Module):
    """``embedding_bag`` of each table; its batches are ids, table by table."""

    def __init__(self, weights: list[torch.Tensor], bags: torch.Tensor) -> None:
        super().__init__()
        self.tables, self.bags = nn.ParameterList(nn.Parameter(weight.detach().clone()) for weight in weights), bags

    def forward(self, ids: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat(embedding_bags(ids, list(self.tables), self.bags, sparse=True), 1)


def run(setup: Setup) -> Iterator[Result]:
    """Forwards, then steps; a peer that cannot be built or run is left out, with a line on standard error."""
    setup = sized(setup)
    if without_torchrec.prepare():
        raise CannotRun("triton/models needs TorchRec and FBGEMM, which are not installed.")
    setup, device = replace(setup, rows=min(setup.rows, _MOST_ROWS)), torch.device(setup.device)
    with _one_rank():
        able = {}
        for name in NAMES:
            try:
                able[name] = _built(name, setup, device)
            except Exception as error:
                _left_out(name, "be built", error)
        for is_training in (False, True):
            yield from _race(able, setup, device, is_training)


@cache
def _ids(setup: Setup, universe: int, are_raw: bool) -> Ids:
    return Ids(setup, "power law", universe, raw=mix64 if are_raw else None)


def _built(name: str, setup: Setup, device: torch.device) -> tuple[nn.Module, list[Any]]:
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan

    import recfx
    from tests.bench.workload import OPTIMIZERS, attach, fill_with_ids, standard_collection, table_weights

    torch.manual_seed(0)
    universe = int(setup.rows * _TAKEN)
    ids = _ids(setup, universe, name == RAW)
    standard = standard_collection(setup)
    collection: Any = copy.deepcopy(standard).to(device)
    backend = "auto" if device.type == "cuda" else "triton"
    batches: list[Any] = [batch.to(device) for batch in ids.batches()]
    if name == PLAIN:
        collection = Plain(table_weights(collection), ids.offsets[: setup.batch + 1].to(device))
        batches = [values.to(device).split(setup.batch * setup.bag_length) for values in ids.values]
    attach(collection, OPTIMIZERS[1])
    if name in (OURS, OURS_IN_DMP, RAW):
        hashing = recfx.HashConfig(dense_rows=0) if name == RAW else None
        collection = recfx.convert(collection, hashing=hashing, backend=backend, verify=False)
    if name == RAW:
        fill_with_ids(collection, standard.to(device), universe)
    model: nn.Module = Model(collection, setup.tables * setup.dim).to(device)
    if name in (DMP, OURS_IN_DMP):
        sharder: Any = EmbeddingBagCollectionSharder() if name == DMP else recfx.sharders()[0]
        per_table = dict.fromkeys(collection.embedding_bags, sharding_plan.table_wise(rank=0))
        plan = sharding_plan.construct_module_sharding_plan(
            collection, per_table, sharder=sharder, local_size=1, world_size=1, device_type=device.type
        )
        plans = ShardingPlan({"ebc": plan})
        model = DistributedModelParallel(model, device=device, plan=plans, sharders=[sharder])
        state = {f"ebc.{key}": value for key, value in standard.state_dict().items()}
        model.load_state_dict(state, strict=False)  # sharding has made new weights
    return model, batches


def _race(
    able: dict[str, tuple[nn.Module, list[Any]]], setup: Setup, device: torch.device, is_training: bool
) -> Iterator[Result]:
    case, contestants, wrong, expected = "train" if is_training else "eval", list[Contestant](), list[str](), None
    for name, (model, batches) in able.items():
        model.train(is_training)
        contestant = Contestant(name, _running(model, batches))
        try:
            output = contestant.run(-1)
            expected = output if expected is None else expected
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        except Exception as error:
            _left_out(name, f"run, or does not give the same ({case})", error)
            wrong += [name] * isinstance(error, AssertionError)
            continue
        contestants.append(contestant)

    def until_done(function: Callable[[], object]) -> float:
        return wall_clock(lambda: (function(), torch.cuda.synchronize() if device.type == "cuda" else None))

    if len(contestants) < 2 or contestants[0].name != OURS:
        raise AssertionError("our own model does not run, or no other does and gives the same")
    times = take_turns(contestants, setup.iterations, setup.warm_up, until_done)
    counts = {contestant.name: _counted(contestant, device) for contestant in contestants}
    for peer in contestants[1:]:
        facts = {**setup.facts("power law"), "optimizer": "adagrad in backward", **machine(device)}
        for who, name in (("ours", OURS), ("peer", peer.name)):
            facts |= {f"{who}_{what}": count for what, count in counts[name].items()}
        yield compare(f"triton/models/{case}", times, OURS, peer.name, facts)
    if wrong:
        raise AssertionError(f"other outputs than those of {OURS!r}: {', '.join(wrong)}")


def _running(model: nn.Module, batches: list[Any]) -> Callable[[int], torch.Tensor]:
    def run_one(i: int) -> torch.Tensor:
        with torch.set_grad_enabled(model.training):
            output: torch.Tensor = model(batches[i])
        if model.training:
            (output - 1).square().mean().backward()
        return output.detach()

    return run_one


def _counted(contestant: Contestant, device: torch.device) -> dict[str, int]:
    """What one run launches, and how often the host waits in it."""
    on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_device]) as profiler:
        contestant.run(-1)
    names = [event.name for event in profiler.events() or ()]
    # The profiler itself waits for the device once, when it ends.
    waits = sum(name in _WAITS for name in names)
    return {"launches": sum("LaunchKernel" in name for name in names), "waits": waits - min(waits, len(on_device))}


def _left_out(name: str, what: str, error: Exception) -> None:
    print(f"triton/models: {name} cannot {what}: {error}", file=sys.stderr, flush=True)


@contextmanager
def _one_rank() -> Iterator[None]:
    """A process group, as ``DistributedModelParallel`` needs one."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
