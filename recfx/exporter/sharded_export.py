"""Exports a sharded model from all its ranks to one file, which rank 0 writes.

Every rank runs the model once, on its own sample: the answer of rank 0 is what the file has to give for rank 0's
sample. The program is made from a copy of the model with small unsharded collections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import LazyAwaitable

from recfx.collections.copy_modules import copy_modules
from recfx.collections.sharding.collection import ShardedCollection, sharded_collections
from recfx.collections.wrappers import unwrap
from recfx.discovery.sample import Sample
from recfx.errors import ExportError
from recfx.exporter.compare_outputs import run_model
from recfx.exporter.model_copies import fresh_copy, on_host, sample_failed, uncounted
from recfx.exporter.ranks import Ranks
from recfx.exporter.table_sources import Sources, TableSource, empty_index
from recfx.hashing import HashIndex
from recfx.ir.shards import ShardedTable
from recfx.runtime.output_dist import unrounded

_Result = TypeVar("_Result")


def export_from_ranks(
    model: nn.Module,
    group: dist.ProcessGroup,
    sample: Sample,
    arguments: Mapping[str, Any],
    check: Callable[[], None],
    export: Callable[[nn.Module, Sample, Any, Sources], _Result],
) -> _Result:
    """Export a sharded model, and return what ``export`` returned on rank 0. Collective.

    Args:
        model: the model on this rank, without wrappers.
        group: the ranks that hold its tables.
        sample: one call of the model on this rank.
        arguments: what all ranks must have passed alike.
        check: checks on rank 0 whether there can be a file.
        export: writes the file on rank 0, given a model with small collections and the call, both on the host, the
            answer of the whole model and where the tables come from. Its error, like any other, is raised on all ranks.
    """
    ranks = Ranks(model, group)
    model = _without_replicas(model)
    by_rank = ranks.agree(lambda: {key: _text(value) for key, value in arguments.items()})
    ranks.agree(lambda: _check_alike(by_rank))
    ranks.agree(lambda: check() if ranks.rank == 0 else None)
    small, call = on_host(model, sample, sharded_collections(model))

    def try_alone() -> None:
        _run(small, call)

    ranks.agree(try_alone)  # without communication: the other ranks would wait for one whose own code raises
    sources = _gathered_tables(ranks)  # before the model runs, because an invalid index stops its rank alone
    with uncounted(model), unrounded(model):
        outputs = _answer(model, sample, ranks)
    if ranks.rank != 0:
        result: _Result = ranks.follow()
        return result
    return ranks.lead(lambda: export(small, call, outputs, sources))


def _text(argument: Any) -> str:
    """A text that is the same for equal arguments, whatever the order of a dict."""
    return str(dict(sorted(argument.items(), key=str)) if isinstance(argument, Mapping) else argument)


def _check_alike(by_rank: list[dict[str, str]]) -> None:
    for rank, arguments in enumerate(by_rank):
        for name, value in arguments.items():
            if value != by_rank[0][name]:
                raise ExportError(
                    f"rank {rank} exports with {name}={value}, rank 0 with {name}={by_rank[0][name]}.",
                    reason="ranks_differ",
                    what_to_do="call export with the same arguments on all ranks.",
                )


def _without_replicas(model: nn.Module) -> nn.Module:
    """A copy of the modules in which ``DistributedDataParallel``, which communicates, is gone."""
    if not any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        return model
    copy, _ = copy_modules(model)
    for module in list(copy.modules()):
        for name, child in module._modules.items():
            if isinstance(child, nn.parallel.DistributedDataParallel):
                module._modules[name] = unwrap(child)
    return copy


def _run(model: nn.Module, sample: Sample) -> Any:
    with sample_failed():
        return _waited(run_model(fresh_copy(model)[0], sample))


def _answer(model: nn.Module, sample: Sample, ranks: Ranks) -> Any:
    """What the sharded model returns; an error on one rank is raised on all of them."""
    outputs, failed = None, None
    try:
        outputs = _run(model, sample)
    except BaseException as error:  # the collections raise it on all ranks
        failed = error

    def confirm() -> None:
        if failed is not None:
            raise failed

    ranks.agree(confirm)
    return outputs


def _waited(value: Any) -> Any:
    """A model's answer without what sharded collections return in place of their outputs."""
    if isinstance(value, LazyAwaitable):
        return value.wait()
    if type(value) in (list, tuple):
        return type(value)(_waited(item) for item in value)
    return {key: _waited(item) for key, item in value.items()} if type(value) is dict else value


@dataclass(eq=False)
class _GatheredTable(TableSource):
    """One sharded table, as rank 0 reads it from all ranks, which know it by its number."""

    number: int
    ranks: Ranks

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows, joined from the parts of all ranks that have some."""
        return self.ranks.rows(self.number, begin, end)

    def read_index(self) -> HashIndex:
        """The whole index, made from the ids of all ranks."""
        index = empty_index(self.spec)
        for begin, end in self.stretches(16):
            self.ranks.ids(self.number, index.row_ids, index.row_state, begin, end)
        index.refresh()  # makes the slots
        return index


def _gathered_tables(ranks: Ranks) -> dict[str, dict[str, TableSource]]:
    """Every sharded table, by collection and name. Collective; only rank 0 may read the pieces.

    Raises:
        CheckpointError: the state that was loaded in place into some rank's index is not valid; raised on all ranks.
    """
    gathered: dict[str, dict[str, TableSource]] = {}
    by_rank = ranks.agree(lambda: [_ids_of_slices(module, table) for _, module, table in ranks.tables])
    for number, (path, module, table) in enumerate(ranks.tables):
        slices = [ids for of_rank in by_rank for ids in of_rank[number]]
        spec = replace(table.table, dtype=module.dtypes[table.table.name])
        ids, side_row = sum(ids for ids, _ in slices), max((row for _, row in slices), default=-1)
        gathered.setdefault(path, {})[spec.name] = _GatheredTable(spec, ids, side_row, number, ranks)
    return gathered


def _ids_of_slices(module: ShardedCollection, table: ShardedTable) -> list[tuple[int, int]]:
    """How many ids each of this rank's slices of a table's index holds, and the table's row of id -1, or -1."""
    ids_of_slices = []
    for shard in table.slices(table.saved) if table.table.has_index else []:
        if shard.rank == module.sharding.rank:
            index = module.store.index(shard.name)
            index.refresh()
            row = int(index.find(torch.tensor([-1], device="cpu")))
            ids_of_slices.append((len(index), row + shard.rows[0] if row >= 0 else -1))
    return ids_of_slices
