"""What a rank saves of sharded tables: its parts of whole tensors, under the names of an unsharded model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import IN_BACKWARD, MODEL
from recfx.checkpoint.storage import Parts
from recfx.checkpoint.table_names import NamedTable, sharded_tables
from recfx.hashing.identity import IDENTITY, identity
from recfx.hashing.index import HashIndex
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, STATISTICS, join_states, part_count, parts_between
from recfx.kernels.index.index_buffers import BATCHES
from recfx.optim.rules.rule import STEP


def tables_contents(model: nn.Module) -> tuple[dict[str, Tensor | Parts], dict[str, list[Tensor]]]:
    """This rank's parts of all sharded tables, and the ``counts`` of its slices, which have yet to be joined.

    Raises:
        CheckpointError: the state that was loaded in place into an index is not valid.
    """
    tensors: dict[str, Tensor | Parts] = {}
    counts: dict[str, list[Tensor]] = {}
    for table in sharded_tables(model):
        _prepare(table)
        tensors[MODEL + table.weight] = _parts(
            table, (table.table.table.num_embeddings, table.table.table.embedding_dim), table.module.store.weight
        )
        if table.table.table.has_index:
            _index(table, tensors, counts)
        if table.first and table.name in table.module.fused:
            _optimizer(table, tensors)
    return tensors, counts


def joined_counts(found: Sequence[dict[str, list[Tensor]]]) -> dict[str, Tensor]:
    """The tables' ``counts`` from those of all ranks."""
    slices: dict[str, list[dict[str, Tensor]]] = {}
    for each in found:
        for name, values in each.items():
            slices.setdefault(name, []).extend({COUNTS: value} for value in values)
    return {name: join_states(states)[COUNTS] for name, states in slices.items()}


def tables_in_backward(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What is saved about fused optimizers of sharded tables, by weight; the same on all ranks.

    ``blocks``: row-wise Adagrad has one state per block of columns; these are saved one after the other.
    """
    found = {}
    for table in sharded_tables(model):
        fused = table.module.fused.get(table.name)
        if fused is None or not table.first:
            continue
        entry: dict[str, Any] = {
            "kind": fused.rule.name,
            "settings": {key: value for key, value in fused.group.items() if key != "params"},
            "values": {},
            "tensors": list(fused.rule.tensor_names),
        }
        if fused.rule.has_row_state and len(table.table.column_blocks) > 1:
            entry["blocks"] = list(table.table.column_blocks)
        found[table.weight] = entry
    return found


def _prepare(table: NamedTable) -> None:
    store = table.module.store
    for shard in table.local():
        if shard.table.has_index:
            store.index(shard.name).refresh()
        if shard.name in store.optimizers:
            store.optimizers[shard.name].prepare(store.weight(shard.name))


def _parts(table: NamedTable, size: tuple[int, ...], tensor_of: Any, blocks: Sequence[tuple[int, int]] = ()) -> Parts:
    """This rank's parts of a tensor cut like the weight or, with ``blocks``, of one with a number per row and block."""
    parts = Parts(size)
    for shard in table.own_saved_shards():
        row, column = shard.rows[0], shard.columns[0]
        if blocks:
            row, column = table.table.stacked_row(shard), 0
        parts.put((row, column), tensor_of(shard.name))
    return parts


def _index(table: NamedTable, tensors: dict[str, Tensor | Parts], counts: dict[str, list[Tensor]]) -> None:
    store, spec = table.module.store, table.table.table
    assert spec.hashing is not None
    for name, key in table.index_keys().items():
        slices = table.own_saved_slices()
        if name == IDENTITY:
            if table.is_first_shard_here():
                tensors[MODEL + key] = identity(spec.hashing, spec.name)
        elif name == COUNTS:
            counts[MODEL + key] = [_counts(store.index(shard.name)) for shard in slices]
        elif name == SLICE_COUNTS:
            parts = tensors[MODEL + key] = Parts((part_count(spec.hashing), len(STATISTICS)))
            for shard in slices:
                index = store.index(shard.name)
                own = index.slice_counts if index.policy.is_whole_table else index.counts_to_save().of_parts
                parts.put((parts_between(spec.hashing, *shard.rows).start, 0), own)
        else:
            parts = tensors[MODEL + key] = Parts((spec.num_embeddings,))
            for shard in slices:
                parts.put((shard.rows[0],), getattr(store.index(shard.name), name))


def _counts(index: HashIndex) -> Tensor:
    """What an index says about the whole table: a slice of it knows only the number of batches."""
    counts = index.counts.clone()
    if not index.policy.is_whole_table:
        counts[BATCHES + 1 :] = 0
    return counts


def _optimizer(table: NamedTable, tensors: dict[str, Tensor | Parts]) -> None:
    store, spec = table.module.store, table.table.table
    rule = table.module.fused[table.name].rule
    for each in rule.states:

        def tensor_of(local: str, name: str = each.name) -> Tensor:
            state: Tensor = store.optimizers[local].state[name]
            return state.view(state.shape[0], math.prod(state.shape[1:]))

        rows = spec.num_embeddings
        blocks = table.table.column_blocks if each.per_row else ()
        size = (len(blocks) * rows, 1) if blocks else (rows, spec.embedding_dim)
        tensors[f"{IN_BACKWARD}{table.weight}.{each.name}"] = _parts(table, size, tensor_of, blocks)
    if rule.counts_steps and table.is_first_shard_here():
        step = store.optimizers[table.table.saved[0].name].state[STEP]
        tensors[f"{IN_BACKWARD}{table.weight}.{STEP}"] = torch.as_tensor(step).detach().reshape(())
