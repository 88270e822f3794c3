"""How the rows of sharded tables travel back to the ranks that own the samples, and what it costs.

Pooled rows have ways back of their own, as reduce-scatters that add them up; rows that are not combined, one for each
id, retrace the exchange of the ids. Backwards are collectives as well, which average gradients over ranks, as
TorchRec's do. This is data alone: ``recfx.runtime.output_dist`` makes the modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import sympy
from torchrec.distributed.types import CommOp

from recfx.ir.meta import BATCH, WORLD, Collective
from recfx.ir.tables import Columns, Shard, columns_of, total_bytes, total_dim


class Travelling:
    """The shards on all ranks of the tables that travel back in one way, the ``columns`` that each sender (a rank, a
    host or all ranks) has of them, and ``once``, the columns of all tables.
    """

    def __init__(self, way: WayBack, shards: Sequence[Shard], world_size: int) -> None:
        self.shards, self._ranks = shards, way.ranks_per_sender(world_size)
        senders: list[dict[Columns, None]] = [{} for _ in range(world_size // self._ranks)]
        for shard in shards:
            senders[shard.rank // self._ranks].update(dict.fromkeys(shard.output_columns))
        self.columns = [tuple(columns) for columns in senders]
        self.once = list(dict.fromkeys(column for columns in senders for column in columns))
        self.dims = tuple(map(total_dim, self.columns))

    @cached_property
    def row_numbers(self) -> list[Any]:
        """How many numbers the rows of single ids have that each sender sends, per sample; and last, those of all."""
        senders: list[dict[Hashable, Any]] = [{} for _ in range(len(self.columns) + 1)]
        for shard in self.shards:
            block = (shard.table.name, shard.columns, shard.rows)
            if block not in senders[-1]:
                senders[-1][block] = shard.num_columns * shard.expected_ids()
            senders[shard.rank // self._ranks][block] = senders[-1][block]
        return [_sum(list(blocks.values())) for blocks in senders]


def _sum(numbers: list[Any]) -> Any:
    # Adding many expressions one by one would take quadratic time.
    return sympy.Add(*numbers) if any(isinstance(number, sympy.Basic) for number in numbers) else sum(numbers)


class Precision(NamedTuple):
    """What TorchRec's codec for one direction makes of float32."""

    name: str = "fp32"  # ``"fp32"``, ``"fp16"`` or ``"bf16"``
    loss_scale: float | None = None  # what numbers are multiplied with while they are on the wire; None for nothing

    def __str__(self) -> str:
        return self.name if self.loss_scale is None else f"{self.name}*{self.loss_scale}"


class Wire(NamedTuple):
    """In which precision ranks send rows, and in the backward their gradients."""

    forward: Precision = Precision()
    backward: Precision = Precision()

    def __str__(self) -> str:
        return f"{self.forward} forward, {self.backward} backward"

    def on(self, call: Collective) -> Collective:
        """A call that sends float32, if it sends this instead."""
        precision = self.backward if call.backward else self.forward
        return replace(call, bytes=call.bytes * _SHARES[precision.name])


_SHARES = {"fp32": sympy.Integer(1), "fp16": sympy.Rational(1, 2), "bf16": sympy.Rational(1, 2)}
"""The bytes that each precision takes of those of float32."""

Wires = Mapping[str, Wire]
"""By the name of TorchRec's ``CommOp``, as in its registries of codecs; what is missing is sent as it is."""

COMM_OPS = {
    "all_to_all": CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name,
    "cross_host": CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name,
    "reduce_scatter": CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name,
    "rows_all_to_all": CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name,
}
"""Which of them each operation of a hop is; the others have none in TorchRec either."""


@dataclass(frozen=True)
class Hop:
    """One ``output_dist_start`` with its ``output_dist_wait``, as one rank sees it."""

    operation: str  # what sends the rows, by its name in ``recfx.runtime.output_dist``
    group: str  # which ranks take part: the name of a field of ``recfx.runtime.dist_groups.DistGroups``
    columns: tuple[Columns, ...]  # the columns that this rank sends, in order
    dims: tuple[int, ...]  # how many columns each sender of the way back sends
    dim: int  # the number of columns that the rank sends; 1 if rows are not combined, because they have several widths
    samples: sympy.Expr  # the symbolic number of rows that it sends
    collectives: tuple[Collective, ...]  # its collective calls in the forward and the backward, with their bytes
    wire: Wire | None = None  # in which precision they are sent; None for that of the rows, and if nothing is sent


@dataclass(frozen=True)
class WayBack:
    """One way back. Tables whose ways back are equal share one ``output_dist``."""

    name: str  # its name in reports
    # every rank goes through the ways back of a collection by ascending place; in different orders, ranks would
    # wait for each other forever
    place: int
    wording: str  # what happens to the rows, in a few words, for reports
    steps: tuple[tuple[str, str], ...]  # the operation and the group of each hop; see :class:`Hop`
    # how many ranks, one after the other, have parts of the same columns and count as one sender; 0 for all
    ranks: int = 0

    @property
    def local_size(self) -> int:
        """The number of ranks per host, if rows are first summed within hosts; otherwise 1."""
        return max(self.ranks, 1)

    @property
    def _is_of_rows(self) -> bool:
        return self.steps[0][0] in _OF_ROWS

    def ranks_per_sender(self, world_size: int) -> int:
        return self.ranks or world_size

    def of_rows(self) -> WayBack:
        """The way back of the rows of tables that are cut alike but not pooled: whatever the cut, it is the same."""
        return ROWS_STAY if self.steps == STAY.steps else ROWS

    def wires_of(self, wires: Wires) -> list[Wire | None]:
        """The wire of each hop; None where rows travel in float32."""
        return [wires.get(COMM_OPS.get(operation, "")) for operation, _ in self.steps]

    def hops(self, travelling: Travelling, rank: int, world_size: int, wires: Wires) -> tuple[Hop, ...]:
        """What a rank sends, hop by hop; the first one takes what the lookups have pooled.

        All ranks, even those without a shard, have the same number of hops, with their collectives in the same order.
        """
        sender, senders = rank // self.ranks_per_sender(world_size), len(travelling.columns)
        columns, dim, rows = travelling.columns[sender], travelling.dims[sender], WORLD * BATCH
        sent, everything = total_bytes(columns), total_bytes(travelling.once)
        if self._is_of_rows:
            numbers, of_all = travelling.row_numbers[sender], travelling.row_numbers[-1]
            dim, rows, sent, everything = 1, rows * numbers, _FLOAT32 * numbers, _FLOAT32 * of_all
        hops = []
        for (operation, group), wire in zip(self.steps, self.wires_of(wires), strict=True):
            calls = _collectives(operation, sent, everything, world_size, senders)
            if wire is not None:
                calls = tuple(map(wire.on, calls))
            samples = senders * BATCH if operation == "cross_host" else rows
            hops.append(Hop(operation, group, columns, travelling.dims, dim, samples, calls, wire if calls else None))
        return tuple(hops)

    def arriving(self, travelling: Travelling) -> list[Columns]:
        """The columns that a rank gets for its own samples, after the last hop: one sender after the other, or all
        columns of the tables, if rows of ids are put together and into the order of the ids.
        """
        if self._is_of_rows:
            return columns_of(tuple({shard.table.name: shard.table for shard in travelling.shards}.values()))
        return [column for columns in travelling.columns for column in columns]


ALL_TO_ALL = WayBack("table_wise", 0, "all-to-all", (("all_to_all", "pooled"),), ranks=1)
"""A rank has whole rows of its columns: one all-to-all brings the columns of all ranks together."""

REDUCE_SCATTER = WayBack("row_wise", 1, "summed over ranks", (("reduce_scatter", "pooled"),))
"""Every rank has a part of every sum: a reduce-scatter adds them up."""


def two_hops(local_size: int) -> WayBack:
    """The ranks of a host have parts of its sums: a reduce-scatter inside hosts, then an all-to-all across them.

    The second hop sends the sums of one host, for this rank and its counterparts, to the ranks of the samples.
    """
    steps = (("reduce_scatter", "intra"), ("cross_host", "cross"))
    return WayBack("table_row_wise", 2, "summed on a host, then all-to-all", steps, ranks=local_size)


STAY = WayBack("data_parallel", 3, "stay", (("own_batch", "pooled"),))
"""Every rank has pooled the samples of all ranks: it takes its own, and the gradients of all ranks are gathered."""

ROWS = WayBack("rows", 0, "all-to-all of the rows of ids", (("rows_all_to_all", "pooled"),), ranks=1)
"""A row for each id goes to the rank that asked for it: one all-to-all, the inverse of that of the ids.

The message to a rank has, for each key of the sender in order, a row of the sender's columns for every id that came
from there."""

ROWS_STAY = WayBack("rows_data_parallel", 3, "stay", (("own_rows", "pooled"),))
"""Every rank has looked up the ids of all ranks: it takes the rows of its own, and gathers all gradients."""

_OF_ROWS = ("rows_all_to_all", "own_rows")
_FLOAT32 = 4


@lru_cache(maxsize=4096, typed=True)  # ranks by the thousand send as much
def _collectives(
    operation: str, sent: sympy.Expr | int, everything: sympy.Expr | int, ranks: int, senders: int
) -> tuple[Collective, ...]:
    """What an operation of so many ranks and senders calls in the forward and, with gradients, in the backward.

    For each of its samples, a rank sends so many bytes, ``sent``, and gets ``everything``.
    """
    across_hosts, of_host = operation == "cross_host", ranks // senders
    if operation in ("own_batch", "own_rows"):
        return (Collective("all_gather", BATCH * everything, backward=True),) if ranks > 1 else ()
    if operation == "reduce_scatter":
        own, part = senders * BATCH * sent, of_host if senders > 1 else 0
        calls = Collective("reduce_scatter", of_host * own, False, part), Collective("all_gather", own, True, part)
        return calls if of_host > 1 and sent else ()
    ranks, part = (senders, senders) if across_hosts else (ranks, 0)
    if ranks == 1:
        return ()
    return (
        Collective("all_to_all", ranks * BATCH * sent, False, part, across_hosts),
        Collective("all_to_all", BATCH * everything, True, part, across_hosts),
    )
