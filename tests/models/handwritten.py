"""Models with one difficulty each."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.utils.checkpoint
from tensordict import TensorDict
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.models.sample import Sample
from tests.builders.batches import batch
from tests.builders.collections import collection, table, two_tables
from tests.models.case import Case

_WIDTH = 24  # columns of `collection()`


def _sparse(batch_size: int) -> Sample:
    return Sample(batch(batch_size))


def _dense_and_sparse(batch_size: int) -> Sample:
    return Sample(torch.rand(batch_size, 3), batch(batch_size))


class Tower(nn.Module):
    """A collection and a layer: what most cases are built around."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.linear = nn.Linear(_WIDTH, 4)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc(features).values())


class _Wrapped(nn.Module):
    """A module that only passes on: puts another one below the root."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.inner(features)


# Contexts and control flow that a traced graph would lose


class _Autocast(Tower):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(features)


class _Checkpointed(Tower):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.linear, self.ebc(features).values(), use_reentrant=False)


class _CheckpointedCollection(Tower):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, features, use_reentrant=False)


class _FrozenBySwitch(nn.Module):
    """Gradients stop at the collection, but not at the layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.linear = nn.Linear(_WIDTH, 4)
        self.beside = nn.Linear(3, 4)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        with torch.set_grad_enabled(False):
            pooled = self.ebc(features).values()
        return self.linear(pooled) + self.beside(dense)


class _BranchesOnData(Tower):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        output = super().forward(features)
        if output.sum() > 0:
            return output * 2
        return -output


class _BranchesOnMode(Tower):
    def forward(self, features: KeyedJaggedTensor) -> Any:
        output = super().forward(features)
        if self.training:
            return output.mean(), {"logits": output}
        return output.sigmoid()


class _Random(Tower):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        output = super().forward(features)
        return nn.functional.dropout(output + torch.rand(4), 0.5, self.training)


class _WithBatchNorm(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_WIDTH)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        self.steps += 1
        return self.linear(self.norm(self.ebc(features).values())) * self.steps


# Places where a collection may sit


class _InModuleList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.collections = nn.ModuleList(
            [EmbeddingBagCollection(tables=[table(f"t_{feature}", [feature], dim=4)]) for feature in ("f1", "f2", "f3")]
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([module(features).values() for module in self.collections], dim=1)


class _InModuleDict(nn.Module):
    """One collection a data group, as large public frameworks have it, and two of the same table name."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleDict(
            {
                "user": EmbeddingBagCollection(tables=[table("t", ["f1"], dim=4)]),
                "item": EmbeddingBagCollection(tables=[table("t", ["f2", "f3"], dim=6)]),
            }
        )

    def forward(self, groups: dict[str, KeyedJaggedTensor]) -> dict[str, KeyedTensor]:
        return {name: module(groups[name]) for name, module in self.groups.items()}


class _UnusualNames(nn.Module):
    """Names of modules and tables that are no Python identifiers, or are Python's own words."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.groups = nn.ModuleDict(
            {name: EmbeddingBagCollection(tables=[table(f"t {name}", ["f1"], dim=4)]) for name in names}
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([module(features).values() for module in self.groups.values()], dim=1)


class _InPythonList(Tower):
    """Called through a plain list; registered under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = [self.ebc, self.linear]

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.stages[1](self.stages[0](features).values())


class _UnderTwoNames(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.same = self.ebc

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc(features).values() - 2 * self.same(features).values())


class _CalledTwice(Tower):
    def forward(self, features: KeyedJaggedTensor, other: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc(features).values() * self.ebc(other).values())


class _NeverCalled(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.unused = collection()
        self.empty = EmbeddingBagCollection(tables=[])


class _TiedWeight(Tower):
    """The output layer reads a table's weight."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return pooled["f1"] @ self.ebc.embedding_bags["t1"].weight.t()


class _Variadic(Tower):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, *kwargs.values())


class _Recursive(nn.Module):
    """A child that knows its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.tower.__dict__["parent"] = self  # a plain attribute: registered, it would be a cycle
        self.scale = nn.Parameter(torch.ones(1))
        self.tower.callback = self.rescale

    def rescale(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.tower.callback(self.tower(features)) + self.tower.parent.scale


class _FrozenTable(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.ebc.embedding_bags["t1"].weight.requires_grad_(False)


class _Subclass(EmbeddingBagCollection):
    """Its forward is the standard one, but the model calls more than that."""

    def width(self) -> int:
        return sum(config.embedding_dim * len(config.feature_names) for config in self.embedding_bag_configs())


class _UsesSubclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = _Subclass(tables=two_tables())

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values()[:, : self.ebc.width() - 1]


# Inputs


class _OptionalArguments(Tower):
    def forward(
        self,
        features: KeyedJaggedTensor,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        output = super().forward(features)
        if weights is not None:
            output = output * weights
        if bias is None:
            return output * scale
        return output + bias


@dataclass
class _Inputs:
    dense: torch.Tensor
    features: KeyedJaggedTensor
    groups: dict[str, KeyedJaggedTensor]
    label: torch.Tensor | None = None


class _DataclassInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.other = EmbeddingBagCollection(tables=[table("t", ["f1"], dim=4)])

    def forward(self, inputs: _Inputs) -> torch.Tensor:
        return torch.cat(
            [inputs.dense, self.ebc(inputs.features).values(), self.other(inputs.groups["user"]).values()], dim=1
        )


def _dataclass_call(batch_size: int) -> Sample:
    return Sample(_Inputs(torch.rand(batch_size, 3), batch(batch_size), {"user": batch(batch_size, ["f1"])}))


def _groups_call(batch_size: int) -> Sample:
    return Sample({"user": batch(batch_size, ["f1"]), "item": batch(batch_size, ["f3", "f2"])})


class _BuildsItsBatch(Tower):
    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return super().forward(KeyedJaggedTensor(keys=["f1", "f2", "f3"], values=values, lengths=lengths))


def _tensors_call(batch_size: int) -> Sample:
    features = batch(batch_size)
    return Sample(features.values(), lengths=features.lengths())


class _BuildsFromJagged(Tower):
    def forward(self, jagged: dict[str, JaggedTensor]) -> torch.Tensor:
        return super().forward(KeyedJaggedTensor.from_jt_dict(jagged))


def _jagged_call(batch_size: int) -> Sample:
    return Sample(batch(batch_size).to_dict())


def _tensor_dict_call(batch_size: int) -> Sample:
    nested = {
        key: torch.nested.nested_tensor_from_jagged(jagged.values(), lengths=jagged.lengths())
        for key, jagged in batch(batch_size).to_dict().items()
    }
    return Sample(TensorDict(nested, batch_size=[]))


# What comes before and after the collection


class _FeatureProcessed(nn.Module):
    """Learned position weights in front of a weighted collection: gradients flow through the batch's weights."""

    def __init__(self) -> None:
        super().__init__()
        tables = [table("t1", ["f1"], dim=4), table("t2", ["f3"], dim=6)]  # f2 stays unused
        processor = PositionWeightedModuleCollection({"f1": 5, "f2": 5, "f3": 5})
        for weight in processor.position_weights.values():
            nn.init.uniform_(weight)
        self.fp_ebc = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables, is_weighted=True), processor
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.fp_ebc(features)


class _ThroughIdentity(Tower):
    """The cut point that other code finds by name."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Identity()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.cut(self.ebc(features))
        return torch.cat([pooled["f3"], pooled["f1"]], dim=1)


class _Regrouped(Tower):
    """KTRegroupAsDict with an unused key, f3 of t2, whose gradient upstream leaves uninitialised."""

    def __init__(self) -> None:
        super().__init__()
        self.regroup = KTRegroupAsDict([["f1"], ["f2"]], ["a", "b"])
        self.linear = nn.Linear(16, 4)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(torch.cat(list(self.regroup([self.ebc(features)]).values()), dim=1))


class _Hooked(Tower):
    """Hooks of every kind that change what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc.register_forward_hook(_double)
        self.ebc.register_forward_pre_hook(_reverse_keys)
        self.linear.register_forward_hook(_plus_one)
        self.register_forward_hook(_plus_one)


def _double(module: nn.Module, args: Any, output: KeyedTensor) -> KeyedTensor:
    return KeyedTensor(output.keys(), output.length_per_key(), output.values() * 2)


def _reverse_keys(module: nn.Module, args: Any) -> Any:
    (features,) = args
    return (features.permute(list(range(len(features.keys())))[::-1]),)


def _plus_one(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


class _HookedByItself(Tower):
    """Takes what it needs from a hook of its own: a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor | None = None
        self.ebc.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: Any, output: KeyedTensor) -> None:
        self.seen = output.values()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        self.ebc(features)
        assert self.seen is not None
        return self.linear(self.seen)


# Wrappers


@contextmanager
def process_group() -> Iterator[None]:
    """One gloo process: what DistributedDataParallel needs."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _compiled_in_place(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    model.compile(backend="eager")
    return model


HANDWRITTEN = [
    Case("tower", Tower, _sparse),
    Case("root_is_the_collection", collection, _sparse),
    Case("autocast", _Autocast, _sparse, whole_graph="untraceable_root", rtol=2e-2, atol=2e-2),
    Case("autocast_below_the_root", lambda: _Wrapped(_Autocast()), _sparse, rtol=2e-2, atol=2e-2),
    Case("checkpoint", _Checkpointed, _sparse, whole_graph="untraceable_root"),
    Case("checkpoint_below_the_root", lambda: _Wrapped(_Checkpointed()), _sparse),
    Case("checkpointed_collection", lambda: _Wrapped(_CheckpointedCollection()), _sparse),
    Case("grad_switched_off", _FrozenBySwitch, _dense_and_sparse, whole_graph="untraceable_root"),
    Case("branches_on_data", _BranchesOnData, _sparse, whole_graph="untraceable_root"),
    Case("branches_on_data_below_the_root", lambda: _Wrapped(_BranchesOnData()), _sparse),
    Case("branches_on_mode", _BranchesOnMode, _sparse),
    Case("random_numbers", _Random, _sparse, whole_graph="whole_graph_differs"),
    Case("random_numbers_below_the_root", lambda: _Wrapped(_Random()), _sparse),
    Case("batch_norm_and_a_counter", lambda: _Wrapped(_WithBatchNorm()), _sparse),
    Case("module_list", _InModuleList, _sparse),
    Case("module_dict", _InModuleDict, _groups_call),
    Case("unusual_names", lambda: _UnusualNames("a-b", "user group", "0", "a_b", "é"), _sparse),
    Case("python_keyword", lambda: _UnusualNames("class", "a"), _sparse, whole_graph="untraceable_root"),
    Case("python_list", _InPythonList, _sparse),
    Case("two_names", _UnderTwoNames, _sparse),
    Case("called_twice", _CalledTwice, lambda b: Sample(batch(b), other=batch(b))),
    Case("never_called", _NeverCalled, _sparse),
    Case("tied_weight", _TiedWeight, _sparse),
    Case("variadic", _Variadic, _sparse),
    Case("variadic_by_name", _Variadic, lambda b: Sample(original=batch(b))),
    Case("child_knows_its_parent", _Recursive, _sparse),
    Case("frozen_table", _FrozenTable, _sparse),
    Case("subclass_with_a_method", _UsesSubclass, _sparse),
    Case("optional_arguments_absent", _OptionalArguments, _sparse),
    Case("optional_arguments", _OptionalArguments, lambda b: Sample(batch(b), None, bias=torch.rand(4))),
    Case("dataclass_input", _DataclassInput, _dataclass_call),
    Case("builds_its_batch", _BuildsItsBatch, _tensors_call),
    Case("builds_from_jagged", lambda: _Wrapped(_BuildsFromJagged()), _jagged_call),
    Case("tensor_dict_input", Tower, _tensor_dict_call),
    Case("feature_processed", _FeatureProcessed, _sparse),
    Case("identity", _ThroughIdentity, _sparse),
    Case("regrouped", _Regrouped, _sparse, skip_gradients=("ebc.embedding_bags.t2.weight",)),
    Case("hooks", lambda: _Wrapped(_Hooked()), _sparse),
    Case("hook_of_its_own", lambda: _Wrapped(_HookedByItself()), _sparse),
    Case("ddp", lambda: nn.parallel.DistributedDataParallel(Tower()), _sparse, around=process_group),
    Case("torch_compile", lambda: _compiled(Tower()), _sparse),
    Case("compiled_in_place", lambda: _compiled_in_place(Tower()), _sparse),
]
