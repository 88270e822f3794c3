"""The whole tables of a sharded collection, on every rank, and the standard collection made of them."""

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
from recfx.collections.sharding.collection import ShardedCollection, sharded_collections
from recfx.collections.sharding.ranks_agree import begin_on_all_ranks, on_all_ranks
from recfx.collections.table_state import whole_index
from recfx.errors import RecfxError
from recfx.hashing.slices import SLICE_COUNTS, join_states
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
    group = module.groups.pooled
    together(group, module.prepare_to_save)
    gathered = ((table.table.name, _gather(module, table, with_optimizers)) for table in module.sharding.tables)
    return {name: table for name, table in gathered if on_rank in (None, group.rank())}


def together(group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Call ``check`` on all ranks; an error on one of them is raised on all. Collective."""
    on_all_ranks(group, check, lambda error: error if isinstance(error, RecfxError) else None)


def _gather(module: ShardedCollection, table: ShardedTable, with_optimizer: bool) -> WholeTable:
    spec, store, index = table.table, module.store, dict[str, Tensor]()
    send = partial(_broadcast, module.groups.pooled)

    def join(columns: int, tensor_of: Callable[[str], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        joined = torch.zeros(spec.num_embeddings, columns, dtype=dtype, device="cpu")
        for shard in table.saved:
            if columns == spec.embedding_dim:
                shard.of(joined)[:] = send(shard, tensor_of, (shard.num_rows, shard.num_columns), dtype)
            else:
                part = send(shard, tensor_of, (shard.num_rows, 1), dtype)
                joined[slice(*shard.rows)] += part * (shard.num_columns / spec.embedding_dim)
        return joined

    def of_index(name: str, local: str) -> Any:
        return getattr(store.index(local), name)

    def of_weight(local: str) -> Tensor:
        return torch.tensor([store.weight(local).requires_grad], device="cpu")

    def of_optimizer(name: str, local: str) -> Any:
        return store.optimizers[local].state[name]

    weight = join(spec.embedding_dim, store.weight, module.dtypes[spec.name])
    if spec.has_index:
        whole, slices = whole_index(spec), []
        saved = {name: getattr(whole, name) for name in state_names(whole.config) if name != SLICE_COUNTS}
        for shard in table.slices(table.saved):
            sizes = {name: like.shape if name in NOT_BY_ROW else (shard.num_rows,) for name, like in saved.items()}
            slices.append({
                name: send(shard, partial(of_index, name), sizes[name], like.dtype) for name, like in saved.items()
            })  # fmt: skip
        index = join_states(slices)
        index[SLICE_COUNTS] = torch.zeros_like(whole.slice_counts, device="cpu")  # `counts` has everything
    fused, first = module.fused.get(spec.name) if with_optimizer else None, table.saved[0]
    if fused is not None:
        fused = fused.without_parameter()
        if fused.rule.counts_steps:
            fused.state[STEP] = send(first, partial(of_optimizer, STEP), (1,), torch.float32)[0].clone()
        for of_rule in fused.rule.states:
            columns = 1 if of_rule.per_row else spec.embedding_dim
            fused.state[of_rule.name] = join(columns, partial(of_optimizer, of_rule.name))
    is_trained = send(first, of_weight, (1,), torch.uint8)
    return WholeTable(weight, index, fused, bool(is_trained))


def _broadcast(
    group: dist.ProcessGroup, shard: Shard, tensor_of: Callable[[str], Any], size: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """What the rank of ``shard`` has, on all of them."""
    if shard.rank == group.rank():
        own = tensor_of(shard.name).detach().reshape(size)
        sent = own.to(sent_on(group), dtype).clone(memory_format=torch.contiguous_format)
    else:
        sent = torch.empty(size, dtype=dtype, device=sent_on(group))
    with LostRanks():
        dist.broadcast(sent, dist.get_global_rank(group, shard.rank), group=group)
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
