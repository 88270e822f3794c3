"""Sharded tables train as TorchRec's do, also by what nobody spelled out; and the report says what that is."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Table, shard_converted
from tests.sharding.ranks import ranks
from tests.support.fake_group import fake_group

SGD, ADAGRAD, ADAM = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam
ADAGRAD_PARAMS = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.2}
# optimizer in backward, its arguments, fused_params of the sharder, what the report says
ROWWISE_PARAMS = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.3, "eps": 0.125}
SETTINGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any] | None, str]] = {
    "none": (None, {}, None, "default_fused_optimizer"),
    "fused_params": (None, {}, ADAGRAD_PARAMS, ""),
    "SGD": (SGD, {}, None, "default_optimizer_setting"),
    "SGD, lr": (SGD, {"lr": 0.1}, None, ""),
    "Adagrad": (ADAGRAD, {}, None, "default_optimizer_setting"),
    "Adagrad, eps": (ADAGRAD, {"lr": 0.1, "eps": 1e-3}, None, ""),
    "Adagrad, eps of fused_params": (ADAGRAD, {"lr": 0.1}, {"eps": 0.01}, "default_optimizer_setting"),
    "decay": (None, {}, {"learning_rate": 0.2, "weight_decay": 0.5}, "weight_decay_left_out"),
    "decay, L2": (None, {}, {"weight_decay": 0.5, "weight_decay_mode": WeightDecayMode.L2}, "weight_decay_left_out"),
    "decay, row-wise": (None, {}, {**ROWWISE_PARAMS, "weight_decay": 0.5}, "weight_decay_left_out"),
    "decay, SGD": (SGD, {"lr": 0.1}, {"weight_decay": 0.5}, "weight_decay_left_out"),
    "row-wise Adagrad": (RowWiseAdagrad, {"lr": 0.1}, None, "default_optimizer_setting"),
}


class Model(nn.Module):
    """A loss so small that eps decides; all weights are the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="a", num_embeddings=6, embedding_dim=4, feature_names=["f"])
        self.sparse = EmbeddingBagCollection(tables=[config])
        self.over = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.sparse(features)["f"]).tanh().sum() * 1e-4


def trained(optimizer: Any, arguments: Any, params: Any, kernel: str, ours: bool) -> tuple[torch.Tensor, list[str]]:
    """The table after three steps of it and of an ordinary optimizer of the rest; and what the report says of it."""
    model: nn.Module = Model()
    if optimizer is not None:
        attach(model.sparse, optimizer, **{"lr": None, **arguments})
    if ours:
        model = recfx.convert(model)
    how = data_parallel() if kernel == "dense" else table_wise(rank=0, compute_kernel=kernel)
    plan = construct_module_sharding_plan(model.sparse, {"a": how}, local_size=1, world_size=1, device_type="cpu")
    sharder = EmbeddingBagCollectionSharder(copy.deepcopy(params))
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"sparse": plan}), sharders=[sharder]
    )
    state = parallel.state_dict()
    for name in state:
        weight = state[name].local_shards()[0].tensor if hasattr(state[name], "local_shards") else state[name]
        with torch.no_grad():
            weight.copy_(torch.arange(weight.numel()).view(weight.shape) / 24 - 0.5)
    rest = torch.optim.SGD([dense for _, dense in in_backward_optimizer_filter(parallel.named_parameters())], lr=50.0)
    for step in range(3):
        rest.zero_grad()
        ids = torch.tensor([0, 1, 1, 2, step * 2])
        parallel(KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([2, 3]))).backward()
        rest.step()
    table = state["sparse.embedding_bags.a.weight"]
    table = table.local_shards()[0].tensor if hasattr(table, "local_shards") else table
    reasons = recfx.explain(parallel.module).collections[0].tables[0].reasons if ours else ()
    return table.detach().clone(), [reason.code for reason in reasons]


def both(rank: int, world_size: int, name: str, kernel: str) -> list[Any]:
    optimizer, arguments, params, _ = SETTINGS[name]
    return [trained(optimizer, arguments, params, kernel, ours) for ours in (False, True)]


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *((name, "fused") for name in SETTINGS),
        *((name, "dense") for name in ("none", "fused_params", "Adagrad", "Adagrad, eps of fused_params")),
        ("decay", "dense"),
    ],
)
def test_three_steps_are_torchrecs(name: str, kernel: str) -> None:
    ((stock, _), (ours, reasons)) = ranks(1).run(both, name, kernel)[0]
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-7)
    optimizer, _, params, said = SETTINGS[name]
    choices = {
        "default_fused_optimizer", "default_optimizer_setting", "dense_kernel_not_fused", "weight_decay_left_out",
    }  # fmt: skip
    if kernel == "dense":
        said = "dense_kernel_not_fused" if optimizer or params else ""
    assert choices.intersection(reasons) == ({said} if said else set())


# What recfx's own sharders do, without other processes


TABLES = tuple(
    Table(name, 16, 4, (f"f_{name}",), "SUM", kind)
    for name, kind in {"all": ("data_parallel",), "rows": ("row_wise",), "one": ("table_wise", 0)}.items()
)


def sharded(
    kernel: str,
    optimizer: type[torch.optim.Optimizer] | None,
    frozen: str = "",
    hashing: dict[str, recfx.HashConfig | None] | None = None,
    **options: Any,
) -> ShardedHashEmbeddingBagCollection:
    """Rank 0 of two."""
    case = Case(TABLES, kernel=kernel)
    standard = EmbeddingBagCollection([table.config() for table in TABLES])
    for name, weight in standard.named_parameters():
        weight.requires_grad_(frozen not in name.split("."))
    if optimizer is not None:
        attach([parameter for parameter in standard.parameters() if parameter.requires_grad], optimizer, lr=0.1)
    converted = recfx.convert(standard, hashing=hashing)
    return shard_converted(case, converted, 2, **options)


@pytest.fixture
def first_of_two() -> Iterator[None]:
    with fake_group(0, 2):
        yield


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize(
    ("kernel", "optimizer", "options", "fused"),
    [
        ("fused", ADAGRAD, {}, {"all": "adagrad", "rows": "adagrad", "one": "adagrad"}),
        ("dense", ADAGRAD, {}, {"all": "adagrad", "rows": "adagrad", "one": "adagrad"}),
        ("dense", None, {}, {}),
        ("dense", None, {"fused_params": ROWWISE_PARAMS}, {"all": "rowwise_adagrad"}),
        ("fused", None, {}, {"all": "sgd", "rows": "sgd", "one": "sgd"}),
        (
            "fused",
            None,
            {"fused_params": ROWWISE_PARAMS},
            {"all": "rowwise_adagrad", "rows": "rowwise_adagrad", "one": "rowwise_adagrad"},
        ),
        ("dense", ADAGRAD, {"dense_as_torchrec": True}, {}),
    ],
)
def test_which_tables_get_a_fused_optimizer(
    kernel: str, optimizer: Any, options: dict[str, Any], fused: dict[str, str]
) -> None:
    """Also a data-parallel one with fused_params, whose kernel TorchRec's planner calls dense."""
    module = sharded(kernel, optimizer, **options)
    assert {name: settings.rule.name for name, settings in module.fused.items()} == fused
    assert set(module.store.optimizers) == set(fused)
    assert not any("params" in settings.group for settings in module.fused.values())  # the whole table
    if options.get("fused_params") and fused:
        assert (module.fused["all"].group["lr"], module.fused["all"].group["eps"]) == (0.3, 0.125)


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("kernel", ["fused", "dense"])
@pytest.mark.parametrize("mode", [WeightDecayMode.L2, WeightDecayMode.DECOUPLE.value])
def test_weight_decay_in_a_mode_that_row_wise_adagrad_follows(mode: int, kernel: str) -> None:
    """FBGEMM's GPU kernels do; there is none for the CPU to compare with, and the report says so."""
    module = sharded(kernel, None, fused_params={**ROWWISE_PARAMS, "weight_decay": 0.25, "weight_decay_mode": mode})
    (reason,) = module.taken["all"]
    assert (module.fused["all"].group["weight_decay"], reason.code) == (0.25, "weight_decay_unlike_torchrec")
    assert WeightDecayMode(mode).name in reason.message
    rule = {WeightDecayMode.L2: "rowwise_adagrad", WeightDecayMode.DECOUPLE: "rowwise_adagrad_decoupled"}[mode]
    assert module.fused["all"].rule.name == rule
