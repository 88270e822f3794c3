"""Models whose state is saved and loaded in sharded tests, and what the tests compare."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

import recfx
from recfx.collections.converted_collection import ConvertedCollection, collections_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.gather import gather_tables
from tests.sharding.cases import (
    Case,
    Model,
    Table,
    as_sequence,
    batches,
    build,
    concatenate,
    shard_converted,
    values_of,
    with_optimizer,
)

LRU = recfx.HashConfig(dense_rows=0, rows=80, buckets=4, on_full="evict")
ADMIT = recfx.HashConfig(
    dense_rows=3, rows=83, buckets=4, on_full="evict", evict="lfu", admit_after=2, unseen="share", seed=3
)

# Which shardings the tables of a case get. Ranks and hosts are taken modulo what there is.
PLANS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "tables": (("table_wise", 0), ("table_wise", 1), ("table_wise", 2), ("table_wise", 1)),
    "rows": (("row_wise",), ("row_wise",), ("table_row_wise", 0), ("row_wise",)),
    "columns": (("column_wise", 0, 1), ("table_column_wise", 1, 1), ("column_wise", 2, 0), ("column_wise", 1, 0)),
    "mixed": (("row_wise",), ("column_wise", 1, 1), ("data_parallel",), ("grid_shard", 0, 1)),
    "replicas": (("data_parallel",), ("table_wise", 1), ("row_wise",), ("data_parallel",)),
}


def case_of(plan: str, hashing: recfx.HashConfig | None = LRU, optimizer: str = "adagrad", world_size: int = 2) -> Case:
    """Four small tables, the last one wide enough for a grid."""
    tables = (
        Table("a", 48, 8, ("f0",)),
        Table("b", 48, 8, ("f1", "f0"), "MEAN"),
        Table("c", 48, 16, ("f2",)),
        Table("d", 48, 256, ("f3",)),
    )
    tables = tuple(replace(table, sharding=kind) for table, kind in zip(tables, PLANS[plan], strict=True))
    local_size = 2 if world_size == 4 else 0
    raw_ids = 0 if hashing is None else 200
    return Case(tables, hashing=hashing, raw_ids=raw_ids, optimizer=optimizer, local_size=local_size)


def in_kinds(case: Case) -> dict[str, Case]:
    """The case of pooled tables, that of sequence tables, and that of a model with both, by name."""
    sequence = as_sequence(case)
    return {"pooled": case, "sequence": sequence, "mixed": replace(sequence, beside=case)}


def make(case: Case, world_size: int, seed: int = 0, group: dist.ProcessGroup | None = None) -> nn.Module:
    """The model on this rank: converted and sharded, over all ranks or a group; on world size 0 converted alone."""
    standard, width = build(replace(case, seed=seed))
    torch.manual_seed(seed + 1)
    model = Model(standard, width)
    converted = with_optimizer(case, recfx.convert(standard, hashing=case.hashing, dedup=case.dedup))
    model.sparse = converted
    if world_size:
        model.sparse = shard_converted(case, converted, world_size, group)
    if case.beside is not None:
        model.beside = make(case.beside, world_size, seed, group).get_submodule("sparse")
    return model


def train(model: nn.Module, case: Case, rank: int, world_size: int, first: int, last: int, parts: int = 12) -> None:
    """Steps of batches that are the same for every number of ranks: ``parts`` of samples, dealt out in order.

    The layer over the tables is left alone; gradients are those of the sum, whatever the number of ranks.
    """
    assert isinstance(model, Model)
    for step in batches(replace(case, sizes=(1,)), parts, last)[first:]:
        share = parts // max(world_size, 1)
        features = concatenate(step[rank * share : (rank + 1) * share])
        collections = [model.sparse] if case.beside is None else [model.sparse, model.beside]
        values = [values_of(collection(features)) for collection in collections]
        (sum(value.square().sum() for value in values) * max(world_size, 1)).backward()  # type: ignore[union-attr]


def gather(value: torch.Tensor) -> torch.Tensor:
    """A whole tensor of what may be sharded; column copies are taken once. Collective."""
    if not isinstance(value, ShardedTensor):
        return value.detach().clone()
    mine = [(shard.metadata.shard_offsets, shard.tensor.clone()) for shard in value.local_shards()]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    shards = [shard for of_rank in everybody for shard in of_rank]
    whole = torch.full(value.metadata().size, 77, dtype=shards[0][1].dtype)
    for offsets, tensor in shards:
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))]
        assert bool(((part == 77) | (part == tensor)).all()), "copies differ"
        part.copy_(tensor)
    return whole


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """All of a model's state as whole tensors, and that of its fused optimizer. Collective.

    What the slices of a table have counted is added up.
    """
    sparse: Any = model.get_submodule("sparse")
    state = {f"sparse.{key}": gather(value) for key, value in sparse.state_dict().items()}
    for key in state:
        if key.endswith(".slice_counts"):
            state[key.replace(".slice_counts", ".counts")][1:] += state[key].sum(dim=0)
            state[key].zero_()
    for key, entry in sparse.fused_optimizer.state_dict()["state"].items():
        state.update({f"{key}/{name}": gather(value) for name, value in entry.items()})
    return state


def model_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The part of ``whole_state`` that the collection's ``load_state_dict`` takes."""
    return {key.removeprefix("sparse."): value for key, value in state.items() if "/" not in key}


def optimizer_state(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The part of ``whole_state`` that ``load_state_dict`` of the collection's fused optimizer takes."""
    entries: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        if "/" in key:
            name, _, inner = key.partition("/")
            entries.setdefault(name, {})[inner] = value
    return {"state": entries}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: bool = True) -> None:
    """Same names and values, statistics included."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, value in actual.items():
        expected_value = expected[name]
        if exact or name.endswith(".counts"):
            assert torch.equal(value, expected_value), name
        else:
            torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def sharded_of(model: nn.Module) -> ShardedCollection:
    sparse = model.get_submodule("sparse")
    assert isinstance(sparse, ShardedCollection)
    return sparse


def counted(model: nn.Module) -> dict[str, list[int]]:
    """What this rank's indexes have counted, by table."""
    counts = {}
    for name, index in sharded_of(model).hash_indexes.items():
        assert isinstance(index, recfx.HashIndex)
        counts[name] = index.index_buffers().counts.tolist()
    return counts


def dcp_state(model: Any) -> dict[str, Any]:
    """What ``torch.distributed.checkpoint`` saves of the model, or loads in place: views."""
    return {"model": model.state_dict(), "optimizer": model.sparse.fused_optimizer.state_dict()}


def save_dcp(model: nn.Module, folder: str) -> None:
    """Save as scripts for ``torch.distributed.checkpoint`` do. Collective."""
    dcp.save(dcp_state(model), checkpoint_id=folder)


def load_dcp(model: Any, folder: str, *, in_place: bool = False) -> None:
    """Load what ``save_dcp`` has saved. Collective; ``in_place``: without ``load_state_dict`` afterwards."""
    state = dcp_state(model)
    dcp.load(state, checkpoint_id=folder)
    if not in_place:
        model.load_state_dict(state["model"])
        model.sparse.fused_optimizer.load_state_dict(state["optimizer"])


def carry_over(model: Any, again: Any, how: str, folder: str) -> None:
    """Let ``again`` load what ``model`` has, by its ``state_dict`` or through a folder. Collective."""
    if how == "state_dict":
        again.load_state_dict(model.state_dict())
        again.sparse.fused_optimizer.load_state_dict(model.sparse.fused_optimizer.state_dict())
    elif how == "checkpoint":
        recfx.save_checkpoint(model, folder)
        recfx.load_checkpoint(again, folder)
    else:
        save_dcp(model, folder)
        load_dcp(again, folder, in_place=how == "dcp in place")


def tables_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weight, index with all of its ``counts``, and fused optimizer of every table, whole. Collective."""
    tensors = {"over": model.get_parameter("over.weight").detach().clone()}
    for path, collection in collections_of(model, ConvertedCollection).items():
        prefix = path.removeprefix("sparse") and f"{path}."
        tensors.update({f"{prefix}{name}": value for name, value in _tables_of(collection).items()})
    return tensors


def _tables_of(sparse: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(sparse, ShardedCollection):
        for name, table in gather_tables(sparse).items():
            tensors[f"{name}.weight"] = table.weight
            tensors.update({f"{name}.index.{key}": value for key, value in table.index.items()})
            assert table.optimizer is not None
            tensors.update({f"{name}.optimizer.{key}": value for key, value in table.optimizer.state.items()})
            tensors[f"{name}.lr"] = torch.tensor(table.optimizer.group["lr"])
        return tensors
    for spec in sparse.tables:
        tensors[f"{spec.name}.weight"] = sparse.weight(spec.name)
        if spec.has_index:
            state = sparse.index(spec.name).state_dict()
            tensors.update({f"{spec.name}.index.{key}": value for key, value in state.items()})
        fused = sparse.fused_optimizers()[spec.name]
        tensors.update({f"{spec.name}.optimizer.{key}": value for key, value in fused.state.items()})
        tensors[f"{spec.name}.lr"] = torch.tensor(fused.group["lr"])
    return {name: value.detach().clone() for name, value in tensors.items()}


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
