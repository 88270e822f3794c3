"""Models that cannot be converted, each with the reason code and where it stands."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests.builders.collections import collection, sequences, table, two_tables
from tests.builders.managed_collisions import managed, mch
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


def with_bag(change: Callable[[nn.EmbeddingBag], nn.Module | None]) -> nn.Module:
    """A tower whose table t1 is another module, or has been changed."""
    tower = Tower()
    bag: Any = tower.ebc.embedding_bags["t1"]
    tower.ebc.embedding_bags["t1"] = change(bag) or bag
    return tower


def with_embedding(change: Callable[[nn.Embedding], object]) -> nn.Module:
    """Sequences whose table s1 has been changed."""
    made = sequences()
    change(made.embeddings["s1"])
    return made


def _parametrized(bag: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(bag, "weight", _Scaled())


def _hooked(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, output: output * 2)


def _forward_on_the_instance() -> nn.Module:
    made = collection()
    standard = made.forward
    made.forward = lambda features: standard(features)  # type: ignore[method-assign]
    return made


def _quantized() -> nn.Module:
    return quantize_embeddings(Holder(collection()), dtype=torch.qint8, inplace=True)


def _quantized_sequences() -> nn.Module:
    made, observer = sequences(), torch.ao.quantization.PlaceholderObserver
    made.qconfig = torch.ao.quantization.QConfig(
        activation=observer.with_args(dtype=torch.float), weight=observer.with_args(dtype=torch.qint8)
    )
    return QuantEmbeddingCollection.from_float(made)


def _fused() -> nn.Module:
    return FusedEmbeddingBagCollection(
        tables=two_tables(), optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}
    )


def _weighted_mean() -> nn.Module:
    return EmbeddingBagCollection(tables=[table("t1", ["f1"], pooling=PoolingType.MEAN)], is_weighted=True)


def _model_parallel() -> nn.Module:
    return DistributedModelParallel(Tower(), device=torch.device("cpu"))


def _below(name: str, build: Callable[[], nn.Module], reason: str, inner: str = "", **others: Any) -> Refused:
    """What ``build`` makes stands in ``arch.sparse``."""
    return Refused(name, lambda: Holder(build()), reason, f"arch.sparse{inner}", **others)


REFUSED = [
    Refused("model_parallel", _model_parallel, "distributed_model_parallel", "", around=process_group),
    _below("model_parallel_below_the_root", _model_parallel, "distributed_model_parallel", around=process_group),
    _below("script_module", lambda: torch.jit.script(collection()), "script_module"),
    Refused("quantized", _quantized, "quantized_collection", "arch.sparse"),
    _below("fused", _fused, "fused_collection"),
    _below("managed_collision", lambda: managed(True, mch, {"t1": ["f1", "f2"], "t2": ["f3"]}), "managed_collision"),
    _below("own_forward", lambda: Doubled(tables=two_tables()), "own_forward"),
    _below("forward_on_the_instance", _forward_on_the_instance, "own_forward"),
    _below("another_implementation", Constant, "unknown_collection"),
    _below("inlined_into_a_graph", lambda: torch.fx.symbolic_trace(Tower()), "inlined_collection"),
    Refused("no_collection", lambda: Holder(nn.Identity()), "no_collection", ""),
    _below("quantized_sequence", _quantized_sequences, "quantized_collection"),
    _below(
        "embedding_with_an_option",
        lambda: with_embedding(lambda layer: setattr(layer, "max_norm", 1.0)),
        "unsupported_bag_option",
    ),
    _below("embedding_with_a_hook", lambda: with_embedding(_hooked), "unsupported_bag"),
    _below("weighted_mean", _weighted_mean, "weighted_mean", runs=False),
    _below(
        "bag_with_own_forward",
        lambda: with_bag(lambda _: TaughtBag(20, 8, mode="sum", include_last_offset=True)),
        "unsupported_bag",
        ".ebc",
    ),
    _below("bag_of_another_class", lambda: with_bag(lambda _: ForeignBag()), "unsupported_bag", ".ebc"),
    _below("bag_with_a_hook", lambda: with_bag(_hooked), "unsupported_bag", ".ebc"),
    _below("parametrized_table", lambda: with_bag(_parametrized), "unsupported_bag", ".ebc"),
    _below(
        "bag_with_an_option",
        lambda: with_bag(lambda bag: setattr(bag, "padding_idx", 0)),
        "unsupported_bag_option",
        ".ebc",
    ),
]
