"""The ranks that export a sharded model together: the first one asks for pieces of tables, and the others send them.

Rank 0 makes the program and writes the file, as it would alone. Meanwhile the other ranks wait for what it asks for, so
none of them holds more than its shards and a piece. Whatever ends the export on one rank ends it on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from recfx.collections.sharding.collection import ShardedCollection, sharded_collections
from recfx.collections.sharding.ranks_agree import group_of_model, on_all_ranks
from recfx.errors import ExportError, RecfxError
from recfx.ir.shard import Shard
from recfx.ir.shards import ShardedTable
from recfx.runtime.dist_groups import sent_on

_Result = TypeVar("_Result")

_ENDED, _ROWS, _IDS, _STATES = range(4)


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold a model's tables; None if nothing is sharded.

    Raises:
        ExportError: ``model_is_sharded`` (by TorchRec alone), ``several_process_groups``, ``no_process_group``.
    """
    return group_of_model(
        model,
        ExportError,
        call="export",
        if_several="shard all collections in one process group, or save a checkpoint and export that.",
        if_sharded_alone="convert the model before it is sharded.",
    )


def agree(group: dist.ProcessGroup | None, function: Callable[[], _Result]) -> list[_Result]:
    """Call ``function``, which must not communicate, on all ranks, and return what each returned. Collective.

    An error is this rank's, or else the one of the first rank where it failed: ``other_rank_failed`` if it is not one
    of recfx's. Without a group, this process is alone.
    """
    rank = 0 if group is None else group.rank()
    return on_all_ranks(group, function, lambda error: _as_sent(error, rank))


def _as_sent(error: BaseException, rank: int) -> Exception:
    if isinstance(error, RecfxError):
        return error
    return ExportError(
        f"rank {rank} failed: {type(error).__name__}: {error}",
        reason="other_rank_failed",
        what_to_do="see the error on that rank; nothing was written.",
    )


class Ranks:
    """The ranks of a sharded model, and its tables in an order that all of them know."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, group.rank()
        self.tables = [
            (path, module, table)
            for path, module in sharded_collections(model).items()
            for table in module.sharding.tables
        ]
        self._device = sent_on(group)
        self._ended = False

    def agree(self, function: Callable[[], _Result]) -> list[_Result]:
        """``agree`` on these ranks; after an error, none of them asks for anything more."""
        try:
            return agree(self.group, function)
        except BaseException:
            self._ended = True
            raise

    # Rank 0

    def lead(self, export: Callable[[], _Result]) -> _Result:
        """Call ``export`` on rank 0, and give its result to the other ranks, which are in ``follow``."""
        try:
            result = export()
        except BaseException as error:  # the other ranks wait for this one
            if not self._ended:
                self._end((_as_sent(error, 0), None))
            raise
        self._end((None, result))
        return result

    def _end(self, outcome: tuple[Exception | None, Any]) -> None:
        self._command(_ENDED)
        self._tell(outcome)

    def rows(self, number: int, begin: int, end: int) -> torch.Tensor:
        """Some rows of a table, ``[end - begin, dim]`` on the CPU, in the dtype that the ranks hold."""
        _, module, table = self.tables[number]
        spec = table.table
        joined = torch.empty(end - begin, spec.embedding_dim, dtype=module.dtypes[spec.name], device="cpu")
        self._gather(_ROWS, number, begin, end, joined)
        return joined

    def ids(self, number: int, row_ids: torch.Tensor, row_state: torch.Tensor, begin: int, end: int) -> None:
        """Write the ids and states of some rows into the whole index's, int64 and uint8 ``[rows]``."""
        self._gather(_IDS, number, begin, end, row_ids[begin:end])
        self._gather(_STATES, number, begin, end, row_state[begin:end])

    def _gather(self, kind: int, number: int, begin: int, end: int, target: torch.Tensor) -> None:
        self._command(kind, number, begin, end)
        self._send(kind, number, begin, end, target)

    # The other ranks

    def follow(self) -> Any:
        """Send rank 0 what it asks for, until it has exported; return what it returned."""
        command = torch.zeros(4, dtype=torch.int64, device=self._device)
        while True:
            self._broadcast(command)
            kind, number, begin, end = command.tolist()
            if kind == _ENDED:
                failed, result = self._tell((None, None))
                if failed is not None:
                    raise failed
                return result
            self._send(kind, number, begin, end, None)

    # All ranks

    def _command(self, kind: int, number: int = 0, begin: int = 0, end: int = 0) -> None:
        self._broadcast(torch.tensor([kind, number, begin, end], device=self._device))

    def _broadcast(self, command: torch.Tensor) -> None:
        dist.broadcast(command, dist.get_global_rank(self.group, 0), group=self.group)

    def _tell(self, outcome: tuple[Exception | None, Any]) -> tuple[Exception | None, Any]:
        sent: list[Any] = [outcome]
        dist.broadcast_object_list(sent, dist.get_global_rank(self.group, 0), group=self.group)
        outcome_of_first: tuple[Exception | None, Any] = sent[0]
        return outcome_of_first

    def _send(self, kind: int, number: int, begin: int, end: int, target: torch.Tensor | None) -> None:
        """Send this rank's parts of a piece to rank 0, which joins them in ``target``."""
        _, module, table = self.tables[number]
        shards = _holders(kind, table, begin, end)
        parts: dict[Shard, torch.Tensor] = {}

        def cut() -> None:
            for shard in shards:
                if shard.rank == self.rank:
                    part = _part(kind, module, shard, begin, end)
                    parts[shard] = part if self.rank == 0 else part.to(self._device).contiguous()

        self.agree(cut)
        for shard in shards:
            if shard.rank == self.rank != 0:
                dist.send(parts[shard], dist.get_global_rank(self.group, 0), group=self.group)
            elif target is not None:
                place = _place(kind, shard, target, begin, end)
                if shard.rank != 0:
                    parts[shard] = torch.empty(place.shape, dtype=place.dtype, device=self._device)
                    dist.recv(parts[shard], dist.get_global_rank(self.group, shard.rank), group=self.group)
                place.copy_(parts.pop(shard))


def _holders(kind: int, table: ShardedTable, begin: int, end: int) -> list[Shard]:
    """The shards that have parts of a piece."""
    saved = table.saved if kind == _ROWS else table.slices(table.saved)
    return [shard for shard in saved if shard.rows[0] < end and begin < shard.rows[1]]


def _part(kind: int, module: ShardedCollection, shard: Shard, begin: int, end: int) -> torch.Tensor:
    first = shard.rows[0]
    rows = slice(max(begin, first) - first, min(end, shard.rows[1]) - first)
    if kind == _ROWS:
        return module.store.weight(shard.name).detach()[rows].view(-1, shard.num_columns)
    index = module.store.index(shard.name)
    return index.row_ids[rows] if kind == _IDS else index.row_state[rows]


def _place(kind: int, shard: Shard, target: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Where a shard's part of a piece belongs in the piece."""
    rows = target[max(begin, shard.rows[0]) - begin : min(end, shard.rows[1]) - begin]
    return rows[:, slice(*shard.columns)] if kind == _ROWS else rows
