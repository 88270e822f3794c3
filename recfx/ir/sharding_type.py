"""What a sharding type must say: the protocol that the files of ``recfx/sharding/types`` implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchrec.distributed.types import ParameterSharding

from recfx.ir.shard import Shard
from recfx.ir.tables import TableSpec
from recfx.ir.way_back import WayBack


@dataclass(frozen=True)
class TablePlan:
    """What a plan says of one table.

    Args:
        table: the table.
        parameter: TorchRec's plan of it.
        world_size: number of ranks.
        path: fully qualified name of the collection, for messages.
    """

    table: TableSpec
    parameter: ParameterSharding
    world_size: int
    path: str = ""


@dataclass(frozen=True)
class Cut:
    """Where the shards of one table are, and how their pooled rows travel.

    Args:
        shards: by column block, then by row; empty ones included; without names yet.
        way_back: of their pooled rows.
        planned_borders: where the plan cuts the rows, if it does; a table with an index is cut at bucket borders.
    """

    shards: Sequence[Shard]
    way_back: WayBack
    planned_borders: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardingType(ABC):
    """A way to cut a table and to place the parts: all that is special about it.

    What passes, state, checkpoints and reports do follows from what it says here: how ids are routed from the shards
    that :meth:`cut` makes (see :class:`Shard`), collectives and the averaging of gradients from their way back.
    Implementations are frozen and have no state, so that equal types are equal objects.

    Attributes:
        name: as plans have it: the value of TorchRec's ``ShardingType``.
        is_replicated: whether every rank has all of the table. Replicas see the ids of all ranks and stay equal; their
            state is saved once, from rank 0, as plain tensors.
        cuts_rows: whether the rows of one column block are on several ranks.
        kernels: the compute kernels that sharders offer for it.
        unplanned_kernels: those that TorchRec's planner refuses in its result; plans that were made otherwise may have
            them.
        is_planned: whether TorchRec's planner can enumerate the type; it knows those of its own alone.
    """

    name: ClassVar[str]
    is_replicated: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = ("fused", "dense")
    unplanned_kernels: ClassVar[tuple[str, ...]] = ("dense",)
    is_planned: ClassVar[bool] = True

    @abstractmethod
    def cut(self, plan: TablePlan) -> Cut:
        """Read and check what a plan says of one table.

        The rows of a table with an index are cut at bucket borders, into as many pieces as the plan has; all other cuts
        are the plan's own, so that checkpoints line up with TorchRec's.

        Raises:
            ConversionError: ``plan_invalid``, ``plan_rank``, ``plan_shape_mismatch``.
        """
