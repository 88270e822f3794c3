"""Collections, plans and batches for sharded tests, and the unsharded model that they are compared with."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import sharding_plan as stock
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.optim import optimizers as placeholders
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import SEQUENCE, kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.shard import shard_collection
from recfx.optim.rules.rowwise_adagrad import DecoupledRowWiseAdagrad
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder
from recfx.runtime.dist_groups import wires_of
from tests.builders.optimizers import attach
from tests.support.needs import Missing

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 2.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2}),
    "adagrad_from_a_half": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2, "initial_accumulator_value": 0.5}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}),
    # Powers of two: sums do not depend on their order.
    "dyadic_sgd": (torch.optim.SGD, {"lr": 0.5}),
    "dyadic_adagrad": (torch.optim.Adagrad, {"lr": 0.5, "eps": 0.25}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "eps": 1e-2}),
    "rowwise_adagrad_decoupled": (DecoupledRowWiseAdagrad, {"lr": 0.1, "eps": 1e-2, "weight_decay": 0.5}),
    # TorchRec's own classes, which only run in fused form.
    "partial_rowwise_adam": (placeholders.PartialRowWiseAdam, {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.5}),
    "lamb": (placeholders.LAMB, {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.5}),
    "partial_rowwise_lamb": (placeholders.PartialRowWiseLAMB, {"lr": 0.05, "eps": 1e-2}),
    "lars_sgd": (placeholders.LarsSGD, {"lr": 5.0, "eta": 0.1, "weight_decay": 0.5}),
}


@dataclass(frozen=True)
class Table:
    """One table of a case. ``sharding``: type, and ranks where it needs some."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "SUM"
    sharding: tuple[Any, ...] = ("table_wise", 0)

    def config(self) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(**self._common(), pooling=PoolingType[self.pooling])

    def sequence_config(self) -> EmbeddingConfig:
        return EmbeddingConfig(**self._common())

    def _common(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_embeddings": self.rows,
            "embedding_dim": self.dim,
            "feature_names": list(self.features),
        }


@dataclass(frozen=True)
class Case:
    """A collection, its plan, and how it is trained.

    ``kernel``: "fused" or "dense"; ``sizes``: batch size by rank, repeated; ``hosts``: ranks are cut into so many;
    ``is_pooled``: whether it is an ``EmbeddingBagCollection``, otherwise an ``EmbeddingCollection``;
    ``beside``: the case of a second collection in models whose state is saved;
    ``dedup``: as for ``recfx.convert``; ``wire``: in which precision rows and their gradients are sent, as
    graphs say it.
    """

    tables: tuple[Table, ...]
    optimizer: str = "sgd"
    kernel: str = "fused"
    is_weighted: bool = False
    sizes: tuple[int, ...] = (3,)
    local_size: int = 0
    hashing: recfx.HashConfig | None = None
    raw_ids: int = 0  # so many different ones, far apart; 0: ids are rows
    seed: int = 0
    is_pooled: bool = True
    beside: Case | None = None
    dedup: Any = "auto"
    wire: tuple[str, str] = ("fp32", "fp32")

    @property
    def codecs(self) -> dict[str, QuantizedCommCodecs] | None:
        """TorchRec's codecs, as they are for devices: on hosts it falls back from bf16 to fp16."""
        (forward, _, scale), backward = self.wire[0].partition("*"), self.wire[1]
        config = QCommsConfig(CommType(forward), CommType(backward), float(scale) if scale else None)
        return get_qcomm_codecs_registry(config, device=torch.device("cuda"))

    def batch_sizes(self, world_size: int) -> list[int]:
        return [self.sizes[rank % len(self.sizes)] for rank in range(world_size)]


def as_sequence(case: Case) -> Case:
    """Makes a case of an ``EmbeddingCollection`` of this one: all tables then have the same number of columns."""
    dim = max(table.dim for table in case.tables)
    tables = tuple(replace(table, dim=dim, pooling="SUM") for table in case.tables)
    return replace(case, tables=tables, is_weighted=False, is_pooled=False)


def deduped(case: Case) -> Case:
    """As a sequence case whose tables send each different id once."""
    return replace(as_sequence(case), dedup=True)


FORMS: dict[str, Callable[[Case], Case]] = {"pooled": lambda case: case, "rows": as_sequence, "rows sent once": deduped}
"""A case of pooled tables; the same of sequence tables; and if these send each different id once."""


def values_of(output: Any, keys: Iterable[str] = ()) -> torch.Tensor:
    """What a collection has returned, as one tensor: ``[B, D]``, or the rows of all keys, ``[n, dim]``.

    ``keys``: those of the rows, where the output is traced.
    """
    if isinstance(output, LazyAwaitable):
        output = output.wait()
    if isinstance(output, dict):
        keys = list(output)
    return torch.cat([output[key].values() for key in keys]) if keys else output.values()


def values_by_rank(output: Any, sizes: list[int]) -> list[torch.Tensor]:
    """``values_of`` what each rank would return, of an output that has the samples of all ranks."""
    if not isinstance(output, dict):
        return list(output.values().split(sizes))
    of_keys = [
        jagged.values().split([int(lengths.sum()) for lengths in jagged.lengths().split(sizes)])
        for jagged in output.values()
    ]
    return [torch.cat(of_rank) for of_rank in zip(*of_keys, strict=True)]


class Model(nn.Module):
    def __init__(self, sparse: Any, width: int) -> None:
        super().__init__()
        self.sparse, self.over = sparse, nn.Linear(width, 3)
        names = sparse.embedding_names_by_table() if kind_of(sparse) is SEQUENCE else []
        self.keys = [name for of_table in names for name in of_table]

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = values_of(self.sparse(features), self.keys)
        return (self.over(values).tanh() ** 2).mean(), values.detach()


# Types that TorchRec makes no plans of, and the type whose plan they read.
PLANNED_AS = {"table_column_wise": "column_wise", "one_rank": "table_wise"}


def plan_of(case: Case, module: nn.Module, world_size: int) -> dict[str, ParameterSharding]:
    makers: dict[str, Callable[..., Any]] = {
        "data_parallel": stock.data_parallel,
        "table_wise": lambda rank=0: stock.table_wise(rank=rank % world_size),
        "column_wise": lambda *on: stock.column_wise(ranks=[rank % world_size for rank in on]),
        "column_sizes": lambda *sizes: _column_sizes(world_size, list(sizes)),
        "row_wise": stock.row_wise,
        "table_row_wise": lambda host=0: stock.table_row_wise(host_index=host % (world_size // local_size)),
        "grid_shard": lambda *hosts: stock.grid_shard(
            host_indexes=[host % (world_size // local_size) for host in hosts]
        ),
    }
    local_size = case.local_size or world_size
    local_size = local_size if world_size % local_size == 0 else world_size
    per_table: dict[str, Any] = {}
    sharder: Any = HashEmbeddingBagCollectionSharder()
    if not case.is_pooled:
        module, sharder = kind_of(module).empty_like(module), EmbeddingCollectionSharder()
    for table in case.tables:
        kind, *on = table.sharding
        per_table[table.name] = makers[PLANNED_AS.get(kind, kind)](*on)
    plan = dict(
        stock.construct_module_sharding_plan(
            module, per_table, sharder=sharder, local_size=local_size, world_size=world_size, device_type="cpu"
        )
    )
    for table in case.tables:
        plan[table.name].compute_kernel = case.kernel
        if table.sharding[0] in PLANNED_AS:
            plan[table.name].sharding_type = table.sharding[0]
    return plan


def _column_sizes(world_size: int, sizes: list[int]) -> Any:
    if "size_per_rank" not in inspect.signature(stock.column_wise).parameters:
        Missing("column_wise(size_per_rank=)", "TorchRec 1.4")()
    return stock.column_wise(ranks=[position % world_size for position in range(len(sizes))], size_per_rank=sizes)


def batches(case: Case, world_size: int, steps: int) -> list[list[KeyedJaggedTensor]]:
    """One batch a step and rank; keys not in the collection's order, one that it does not know."""
    generator = torch.Generator().manual_seed(case.seed + 17)
    rows: dict[str, int] = {}
    for table in case.tables:
        for feature in table.features:
            rows[feature] = min(rows.get(feature, table.rows), table.rows)
    keys = sorted(rows, key=lambda key: random.Random(key).random())
    keys.insert(len(keys) // 2, "unknown")
    raw = (5, 2**55 + 1) if case.raw_ids else (0, 1)
    if case.raw_ids:
        rows = dict.fromkeys(rows, case.raw_ids)
    return [
        [_batch(keys, rows, size, case.is_weighted, generator, raw) for size in case.batch_sizes(world_size)]
        for _ in range(steps)
    ]


def _batch(
    keys: list[str],
    rows: dict[str, int],
    size: int,
    is_weighted: bool,
    generator: torch.Generator,
    raw: tuple[int, int],
) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=generator)
    shift, stretch = raw
    per_key = lengths.view(len(keys), size).sum(1).tolist()
    values = [
        (torch.randint(0, rows.get(key, 5), (count,), generator=generator) - shift) * stretch
        for key, count in zip(keys, per_key, strict=True)
    ]
    weights = torch.rand(int(lengths.sum()), generator=generator) if is_weighted else None
    return KeyedJaggedTensor(keys, torch.cat(values), weights, lengths=lengths)


def variable_batch(rank: int, step: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """A batch with inverse indices, and the same written out."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    keys, size = ["f0", "shared", "f1", "f2", "f3"], 4 + rank
    strides = torch.randint(1, size + 1, (len(keys),), generator=generator).tolist()
    lengths = torch.randint(0, 4, (sum(strides),), generator=generator)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    inverse = torch.stack([torch.randint(0, stride, (size,), generator=generator) for stride in strides])
    short = KeyedJaggedTensor(
        keys,
        ids,
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(keys, inverse),
    )
    first = torch.tensor([0, *strides[:-1]]).cumsum(0).unsqueeze(1)
    bags = (inverse + first).view(-1).tolist()
    by_bag = ids.split(lengths.tolist())
    written_out = torch.cat([by_bag[bag] for bag in bags])
    return short, KeyedJaggedTensor(keys, written_out, lengths=lengths[bags])


def concatenate(parts: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The batches of all ranks as one."""
    keys = parts[0].keys()
    features = [part[key] for key in keys for part in parts]
    weights = torch.cat([one.weights() for one in features]) if parts[0].weights_or_none() is not None else None
    values, lengths = (torch.cat([getattr(one, name)() for one in features]) for name in ("values", "lengths"))
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths)


def build(case: Case) -> tuple[Any, int]:
    """The standard collection, the same on every rank, and its width."""
    torch.manual_seed(case.seed)
    if not case.is_pooled:
        return EmbeddingCollection([table.sequence_config() for table in case.tables]), case.tables[0].dim
    tables = [table.config() for table in case.tables]
    standard = EmbeddingBagCollection(tables=tables, is_weighted=case.is_weighted)
    return standard, sum(table.dim * len(table.features) for table in case.tables)


def plain_model(case: Case) -> Model:
    """The standard collection and the layer over it, the same on every rank."""
    standard, width = build(case)
    torch.manual_seed(1)
    return Model(standard, width)


def with_optimizer(case: Case, standard: nn.Module) -> nn.Module:
    """The optimizer in the backward of the tables, if the kernels are fused."""
    if case.kernel == "fused":
        kind, settings = OPTIMIZERS[case.optimizer]
        attach(standard, kind, **settings)
    return standard


def taken(case: Case, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that the case's optimizer takes: a vector has no rows for row-wise Adagrad, and stays as it is."""
    return [parameter for parameter in parameters if case.optimizer != "rowwise_adagrad" or parameter.dim() > 1]


def shard(case: Case, standard: nn.Module, world_size: int) -> ShardedCollection:
    converted = with_optimizer(case, recfx.convert(standard, hashing=case.hashing, dedup=case.dedup))
    return shard_converted(case, converted, world_size, wires=wires_of(case.codecs))


def shard_converted(
    case: Case, converted: Any, world_size: int, group: dist.ProcessGroup | None = None, **options: Any
) -> Any:
    """A collection that is converted, sharded by the case's plan over a group, by default of all ranks."""
    env = ShardingEnv.from_process_group(group or dist.group.WORLD)
    return shard_collection(converted, plan_of(case, converted, world_size), env, **options)


def model_and_plan(case: Case, world_size: int, *, is_converted: bool = True) -> tuple[Model, ShardingPlan]:
    """The model of a case, converted or standard, and its plan."""
    model = plain_model(case)
    converted = recfx.convert(model, hashing=case.hashing, dedup=case.dedup)
    assert isinstance(converted, Model)
    if is_converted:
        model = converted
    with_optimizer(case, model.sparse)
    return model, ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan_of(case, converted.sparse, world_size))})


def model_parallel(model: nn.Module, plan: ShardingPlan, **options: Any) -> DistributedModelParallel:
    """The model, sharded by TorchRec with the sharders of recfx."""
    cpu = torch.device("cpu")
    return DistributedModelParallel(model, device=cpu, plan=plan, sharders=recfx.sharders(), **options)


def dense_parameters(case: Case, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no fused optimizer trains."""
    return [p for name, p in model.named_parameters() if case.kernel == "dense" or ".embedding" not in name]


def sharded_model(case: Case, world_size: int) -> Model:
    """The model of a case, sharded by ``recfx.convert``."""
    model, plan = model_and_plan(case, world_size)
    sharded = recfx.convert(model, plan=plan)
    assert isinstance(sharded, Model)
    return sharded


def shards_of(sparse: ShardedCollection) -> list[tuple[str, Any, Any, torch.Tensor]]:
    """Table, rows, columns and weights of each of this rank's shards."""
    return [
        (shard.table.name, shard.rows, shard.columns, sparse.weight(shard.name).detach().clone())
        for shard in sparse.sharding.local()
    ]


def train_sharded(rank: int, world_size: int, case: Case, steps: int = 3) -> dict[str, Any]:
    """Train on this rank; what it has pooled at every step, its shards, and the layer over them."""
    model = plain_model(case)
    model.sparse = shard(case, model.sparse, world_size)
    model.over = nn.parallel.DistributedDataParallel(model.over)
    kind, settings = OPTIMIZERS[case.optimizer]
    optimizer = kind(taken(case, dense_parameters(case, model)), **settings)
    pooled = []
    for step in batches(case, world_size, steps):
        optimizer.zero_grad()
        loss, values = model(step[rank])
        loss.backward()
        optimizer.step()
        pooled.append(values)
    indexes = {
        shard.table.name: (shard.rows, copy.deepcopy(model.sparse.index(shard.name).state_dict()))
        for shard in model.sparse.sharding.local()
        if shard.name in model.sparse.hash_indexes
    }
    return {
        "pooled": pooled,
        "shards": shards_of(model.sparse),
        "over": model.over.module.weight.detach(),
        "indexes": indexes,
    }


def train_unsharded(case: Case, world_size: int, steps: int = 3) -> dict[str, Any]:
    """The oracle: the standard model on everybody's samples, the loss the mean of the ranks' losses.

    Not for fused Adam, which steps touched rows alone.
    """
    model = plain_model(case)
    kind, settings = OPTIMIZERS[case.optimizer]
    optimizer = kind(taken(case, model.parameters()), **settings)
    return _train_on_everybody(case, world_size, steps, model, optimizer)


def train_whole(case: Case, world_size: int, steps: int = 3) -> tuple[dict[str, Any], UnshardedCollection]:
    """The oracle of hashed tables: the unsharded converted collection on everybody's samples."""
    model = plain_model(case)
    converted = model.sparse = with_optimizer(case, recfx.convert(model.sparse, hashing=case.hashing, dedup=case.dedup))
    assert isinstance(converted, UnshardedCollection)
    kind, settings = OPTIMIZERS[case.optimizer]
    optimizer = kind(dense_parameters(case, model), **settings)
    return _train_on_everybody(case, world_size, steps, model, optimizer), converted


def _train_on_everybody(
    case: Case, world_size: int, steps: int, model: Model, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """What is pooled at every step on each rank's samples, the weights of whole tables, and the layer over them."""
    sizes, pooled = case.batch_sizes(world_size), []
    for step in batches(case, world_size, steps):
        model.zero_grad()
        features = concatenate(step)
        values = values_by_rank(model.sparse(features), sizes)
        losses = [(model.over(part).tanh() ** 2).mean() for part in values if part.numel()]
        sum(losses).div(world_size).backward()
        optimizer.step()
        pooled.append([part.detach() for part in values])
    tables: Any = kind_of(model.sparse).tables_of(model.sparse)
    weights = {table.name: tables[table.name].weight.detach() for table in case.tables}
    return {"pooled": pooled, "weights": weights, "over": model.over.weight.detach()}


def check(
    case: Case,
    world_size: int,
    answers: list[dict[str, Any]],
    rtol: float = 1e-5,
    atol: float = 1e-6,
    expected: dict[str, Any] | None = None,
) -> None:
    """Compare what the ranks have with the unsharded model. Every number of every table is on some rank."""
    if expected is None:
        expected = train_unsharded(case, world_size, len(answers[0]["pooled"]))
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    for rank, answer in enumerate(answers):
        for step, pooled in enumerate(answer["pooled"]):
            close(pooled, expected["pooled"][step][rank], msg=lambda m: f"step {step} on rank {rank}: {m}")  # noqa: B023
        close(answer["over"], expected["over"])
    covered = {name: torch.zeros_like(weight) for name, weight in expected["weights"].items()}
    for rank, answer in enumerate(answers):
        for name, (first, end), (left, right), weight in answer["shards"]:
            close(
                weight,
                expected["weights"][name][first:end, left:right],
                msg=lambda m: f"table {name} on rank {rank}: {m}",  # noqa: B023
            )
            covered[name][first:end, left:right] += 1
    for table in case.tables:
        copies = world_size if table.sharding[0] == "data_parallel" else 1
        assert bool((covered[table.name] == copies).all()), f"table {table.name} is not on the ranks as a whole"
