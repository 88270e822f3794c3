"""Models that cannot be converted, each with the reason code and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests.builders.collections import collection, sequences, table, two_tables
from tests.models.handwritten import Tower, process_group


@dataclass(frozen=True)
class Refused:
    """A model that ``convert`` refuses.

    Args:
        name: test id.
        build: makes the model; it takes a KJT of f1, f2 and f3.
        reason: reason code.
        module_path: what the error names.
        runs: whether the model runs at all before.
        around: a context in which the test runs.
    """

    name: str
    build: Callable[[], nn.Module]
    reason: str
    module_path: str
    runs: bool = True
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Holder(nn.Module):
    """A module in ``arch.sparse``."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.arch = nn.Module()
        self.arch.sparse = sparse

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.arch.sparse(features)


class Doubled(EmbeddingBagCollection):
    """Its forward is its own."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = super().forward(features)
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values() * 2)


class Constant(EmbeddingBagCollectionInterface):
    """Another implementation of the interface."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return KeyedTensor(["f1"], [1], torch.ones(features.stride(), 1))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return []

    def is_weighted(self) -> bool:
        return False


class TaughtBag(nn.EmbeddingBag):
    """A table with its own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) * 3


class ForeignBag(nn.Module):
    """A table that is no nn.EmbeddingBag."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(20, 8))

    def forward(self, input: torch.Tensor, offsets: torch.Tensor, per_sample_weights: Any = None) -> torch.Tensor:
        return nn.functional.embedding_bag(input, self.weight, offsets, mode="sum", include_last_offset=True)


class _Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def with_bag(bag: nn.Module) -> nn.Module:
    """A tower whose table t1 is another module."""
    tower = Tower()
    tower.ebc.embedding_bags["t1"] = bag
    return Holder(tower)


def with_embedding(change: Callable[[nn.Embedding], object]) -> nn.Module:
    """Sequences whose table s1 has been changed."""
    made = sequences()
    change(made.embeddings["s1"])
    return Holder(made)


def _parametrized() -> nn.Module:
    tower = Tower()
    nn.utils.parametrize.register_parametrization(tower.ebc.embedding_bags["t1"], "weight", _Scaled())
    return Holder(tower)


def _hooked_bag() -> nn.Module:
    tower = Tower()
    tower.ebc.embedding_bags["t1"].register_forward_hook(lambda module, args, output: output * 2)
    return Holder(tower)


def _forward_on_the_instance() -> nn.Module:
    made = collection()
    standard = made.forward
    made.forward = lambda features: standard(features)  # type: ignore[method-assign]
    return made


def _managed_collision() -> nn.Module:
    tables = two_tables()
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=torch.device("cpu"),
            eviction_interval=1000,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for config in tables
    }
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables),
        ManagedCollisionCollection(managed_collision_modules=modules, embedding_configs=tables),
    )


def _quantized() -> nn.Module:
    model = Holder(collection())
    return quantize_embeddings(model, dtype=torch.qint8, inplace=True)


def _quantized_sequences() -> nn.Module:
    made, observer = sequences(), torch.ao.quantization.PlaceholderObserver
    made.qconfig = torch.ao.quantization.QConfig(
        activation=observer.with_args(dtype=torch.float), weight=observer.with_args(dtype=torch.qint8)
    )
    return Holder(QuantEmbeddingCollection.from_float(made))


def _fused() -> nn.Module:
    return FusedEmbeddingBagCollection(
        tables=two_tables(), optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}
    )


class _MeanOfWeighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=[table("t1", ["f1"], pooling=PoolingType.MEAN)], is_weighted=True)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.ebc(features)


REFUSED = [
    Refused(
        "model_parallel",
        lambda: DistributedModelParallel(Tower(), device=torch.device("cpu")),
        "distributed_model_parallel",
        "",
        around=process_group,
    ),
    Refused(
        "model_parallel_below_the_root",
        lambda: Holder(DistributedModelParallel(Tower(), device=torch.device("cpu"))),
        "distributed_model_parallel",
        "arch.sparse",
        around=process_group,
    ),
    Refused("script_module", lambda: Holder(torch.jit.script(collection())), "script_module", "arch.sparse"),
    Refused("quantized", _quantized, "quantized_collection", "arch.sparse"),
    Refused("fused", lambda: Holder(_fused()), "fused_collection", "arch.sparse"),
    Refused("managed_collision", lambda: Holder(_managed_collision()), "managed_collision", "arch.sparse"),
    Refused("own_forward", lambda: Holder(Doubled(tables=two_tables())), "own_forward", "arch.sparse"),
    Refused("forward_on_the_instance", lambda: Holder(_forward_on_the_instance()), "own_forward", "arch.sparse"),
    Refused("another_implementation", lambda: Holder(Constant()), "unknown_collection", "arch.sparse"),
    Refused(
        "inlined_into_a_graph", lambda: Holder(torch.fx.symbolic_trace(Tower())), "inlined_collection", "arch.sparse"
    ),
    Refused("no_collection", lambda: Holder(nn.Identity()), "no_collection", ""),
    Refused("quantized_sequence", _quantized_sequences, "quantized_collection", "arch.sparse"),
    Refused(
        "embedding_with_an_option",
        lambda: with_embedding(lambda layer: setattr(layer, "max_norm", 1.0)),
        "unsupported_bag_option",
        "arch.sparse",
    ),
    Refused(
        "embedding_with_a_hook",
        lambda: with_embedding(lambda layer: layer.register_forward_hook(lambda module, args, output: output * 2)),
        "unsupported_bag",
        "arch.sparse",
    ),
    Refused("weighted_mean", lambda: Holder(_MeanOfWeighted()), "weighted_mean", "arch.sparse.ebc", runs=False),
    Refused(
        "bag_with_own_forward",
        lambda: with_bag(TaughtBag(20, 8, mode="sum", include_last_offset=True)),
        "unsupported_bag",
        "arch.sparse.ebc",
    ),
    Refused("bag_of_another_class", lambda: with_bag(ForeignBag()), "unsupported_bag", "arch.sparse.ebc"),
    Refused("bag_with_a_hook", _hooked_bag, "unsupported_bag", "arch.sparse.ebc"),
    Refused("parametrized_table", _parametrized, "unsupported_bag", "arch.sparse.ebc"),
    Refused(
        "bag_with_an_option",
        lambda: with_bag(nn.EmbeddingBag(20, 8, mode="sum", include_last_offset=True, padding_idx=0)),
        "unsupported_bag_option",
        "arch.sparse.ebc",
    ),
]
