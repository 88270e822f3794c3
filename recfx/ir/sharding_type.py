"""What defines a sharding type: the interface that the files in ``recfx/collections/sharding/types`` implement."""

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
    """What a plan says about one table.

    Args:
        table: the table.
        parameter: TorchRec's plan for the table.
        world_size: the number of ranks.
        path: fully qualified name of the collection, for messages.
    """

    table: TableSpec
    parameter: ParameterSharding
    world_size: int
    path: str = ""


@dataclass(frozen=True)
class Cut:
    """Where the shards of one table are, and how their pooled rows travel back.

    Args:
        shards: by column block, then by row, including empty ones; they have no names yet.
        way_back: how their pooled rows travel back.
        planned_borders: where the plan cuts the rows, if it does; a table with an index is cut at bucket borders.
    """

    shards: Sequence[Shard]
    way_back: WayBack
    planned_borders: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardingType(ABC):
    """A way to cut a table and to place its parts, with everything that is specific to it.

    Passes, state, checkpoints and reports derive everything else from this: the routing of ids from the shards that
    :meth:`cut` returns (see :class:`Shard`), and collectives and the averaging of gradients from their way back.
    Implementations are frozen and have no state, so all objects of one type are equal.

    Attributes:
        name: its name in plans: the value of TorchRec's ``ShardingType``.
        is_replicated: whether every rank has the whole table. Replicas see the ids of all ranks and stay equal; their
            state is saved once, from rank 0, as plain tensors.
        cuts_rows: whether the rows of one column block are on several ranks.
        kernels: the compute kernels that sharders offer for it.
        unplanned_kernels: those kernels that TorchRec's planner refuses in its result; plans that were made in other
            ways may have them.
        is_planned: whether TorchRec's planner can enumerate the type; it only knows its own types.
    """

    name: ClassVar[str]
    is_replicated: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = ("fused", "dense")
    unplanned_kernels: ClassVar[tuple[str, ...]] = ("dense",)
    is_planned: ClassVar[bool] = True

    @abstractmethod
    def cut(self, plan: TablePlan) -> Cut:
        """Read and check what a plan says about one table.

        The rows of a table with an index are cut at bucket borders, into as many pieces as the plan has; all other cuts
        are those of the plan, so that checkpoints match TorchRec's.

        Raises:
            ConversionError: ``plan_invalid``, ``plan_rank``, ``plan_shape_mismatch``.
        """
