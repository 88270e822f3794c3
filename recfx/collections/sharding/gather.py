"""The whole tables of a sharded collection, on every rank, and the standard collection made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from recfx.collections.copy_modules import carry_hooks
from recfx.collections.kinds import kind_of
from recfx.collections.load_state import whole_index
from recfx.collections.sharding.collection import ShardedCollection, sharded_collections
from recfx.collections.sharding.ranks_agree import begin_on_all_ranks, on_all_ranks
from recfx.errors import RecfxError
from recfx.hashing.slices import SLICE_COUNTS, STATISTICS, join_states, parts_between
from recfx.hashing.state import NOT_BY_ROW, state_names
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import Shard
from recfx.kernels.index.index_buffers import is_taken
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import attach_unfused
from recfx.optim.rules.rule import STEP
from recfx.runtime.dist_groups import sent_on
from recfx.runtime.marks import LostRanks


@dataclass(frozen=True)
class WholeTable:
    """One table; tensors on the CPU. ``index`` is by buffer name, with statistics added up; empty if there is none."""

    weight: Tensor
    index: dict[str, Tensor]
    optimizer: FusedOptimizer | None
    requires_grad: bool


def gather_tables(
    module: ShardedCollection, *, on_rank: int | None = None, with_optimizers: bool = True
) -> dict[str, WholeTable]:
    """Every table of the collection, by name, on every rank. Collective; it takes the memory of all tables.

    With ``on_rank``, the other ranks return nothing, and hold one or two whole tables at a time.

    If columns are cut, a state with one number per row, such as that of row-wise Adagrad, has one number per column
    block. That of the table is their mean, weighted by columns, which is what the uncut table would have after the same
    gradients.
    """
    gatherer = _Gatherer(module)
    together(gatherer.group, module.prepare_to_save)
    gathered = ((table.table.name, gatherer.gather(table, with_optimizers)) for table in module.sharding.tables)
    return {name: table for name, table in gathered if on_rank in (None, gatherer.rank)}


def together(group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Call ``check`` on all ranks; an error on one of them is raised on all. Collective."""
    on_all_ranks(group, check, lambda error: error if isinstance(error, RecfxError) else None)


class _Gatherer:
    def __init__(self, module: ShardedCollection) -> None:
        self.module, self.store = module, module.store
        self.group, self.rank = module.groups.pooled, module.groups.pooled.rank()
        self.device = sent_on(self.group)

    def gather(self, table: ShardedTable, with_optimizer: bool) -> WholeTable:
        spec, store = table.table, self.store
        weight = self._join(table, spec.embedding_dim, store.weight, self.module.dtypes[spec.name])
        index: dict[str, Tensor] = {}
        if spec.has_index:
            index = join_states([self._index(shard) for shard in table.slices(table.saved)])
        optimizer = None
        if with_optimizer and spec.name in self.module.fused:
            optimizer = self._optimizer(table, self.module.fused[spec.name])
        first = table.saved[0]
        trained = self._send(
            first, lambda name: torch.tensor([store.weight(name).requires_grad], device="cpu"), (1,), torch.uint8
        )
        return WholeTable(weight, index, optimizer, bool(trained))

    def _join(
        self, table: ShardedTable, columns: int, tensor_of: Callable[[str], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """``[rows, columns]``, joined from the shards' parts; one column if it is a mean over columns."""
        dim = table.table.embedding_dim
        joined = torch.zeros(table.table.num_embeddings, columns, dtype=dtype, device="cpu")
        for shard in table.saved:
            if columns == dim:
                shard.of(joined)[:] = self._send(shard, tensor_of, (shard.num_rows, shard.num_columns), dtype)
            else:
                part = self._send(shard, tensor_of, (shard.num_rows, 1), dtype)
                joined[slice(*shard.rows)] += part * (shard.num_columns / dim)
        return joined

    def _index(self, shard: Shard) -> dict[str, Tensor]:
        whole = whole_index(shard.table)
        state = {}
        for name in state_names(whole.config):
            like: Tensor = getattr(whole, name)
            if name == SLICE_COUNTS:  # indexes have everything in their `counts`
                parts = parts_between(whole.config, *shard.rows)
                state[name] = torch.zeros(len(parts), len(STATISTICS), dtype=like.dtype, device="cpu")
                continue
            size = tuple(like.shape) if name in NOT_BY_ROW else (shard.num_rows,)
            state[name] = self._send(shard, partial(self._index_tensor, name), size, like.dtype)
        return state

    def _optimizer(self, table: ShardedTable, fused: FusedOptimizer) -> FusedOptimizer:
        state: dict[str, Any] = {}
        if fused.rule.counts_steps:
            state[STEP] = self._send(table.saved[0], partial(self._state, STEP), (1,), torch.float32)[0].clone()
        for of_rule in fused.rule.states:
            columns = 1 if of_rule.per_row else table.table.embedding_dim
            state[of_rule.name] = self._join(table, columns, partial(self._state, of_rule.name), torch.float32)
        return FusedOptimizer(fused.rule, {key: value for key, value in fused.group.items() if key != "params"}, state)

    def _index_tensor(self, name: str, local: str) -> Tensor:
        tensor: Tensor = getattr(self.store.index(local), name)
        return tensor

    def _state(self, name: str, local: str) -> Tensor:
        state: Tensor = self.store.optimizers[local].state[name]
        return state

    def _send(
        self, shard: Shard, tensor_of: Callable[[str], Tensor], size: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Broadcast what one rank has to all of them."""
        if shard.rank == self.rank:
            own = tensor_of(shard.name).detach().reshape(size)
            sent = own.to(self.device, dtype).clone(memory_format=torch.contiguous_format)
        else:
            sent = torch.empty(size, dtype=dtype, device=self.device)
        with LostRanks():
            dist.broadcast(sent, dist.get_global_rank(self.group, shard.rank), group=self.group)
        return sent.cpu()


def without_model_parallel(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedModelParallel``, if it is inside one."""
    return get_unwrapped_module(model) if isinstance(model, DistributedModelParallel) else model


def gather_collections(model: nn.Module) -> dict[str, dict[str, WholeTable]]:
    """The whole tables of every sharded collection, by its name and theirs, on every rank. Collective."""
    begin_on_all_ranks(list(sharded_collections(model).values()), "unconvert")
    return {path: gather_tables(module) for path, module in sharded_collections(model).items()}


def held_ids(table: WholeTable) -> tuple[Tensor, Tensor]:
    """The ids of a table and their rows, int64 ``[n]`` each, by row."""
    rows = torch.nonzero(is_taken(table.index["row_state"])).squeeze(1)
    return table.index["row_ids"][rows], rows


def unsharded_collection(module: ShardedCollection, tables: dict[str, WholeTable]) -> nn.Module:
    """An unsharded collection of whole tables on the CPU, their fused optimizers attached in dense form."""
    kind = kind_of(module)
    standard = kind.empty_like(module)
    holders: Any = kind.tables_of(standard)
    for name, table in tables.items():
        holders[name].weight = nn.Parameter(table.weight, requires_grad=table.requires_grad)
        if table.optimizer is not None:
            attach_unfused(holders[name].weight, table.optimizer)
    standard._device = torch.device("cpu")
    carry_hooks(module, standard)
    standard.train(module.training)
    return cast(nn.Module, standard)
