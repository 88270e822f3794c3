"""When a batch may train, and how long it is in flight: hashed, but its gradients have not reached the tables yet.

Which rows an eviction may take follows from the calls that all ranks make, and from nothing else: a batch keeps its
rows until its backward has run, or for ``batches_in_flight`` later forwards of its collection. A graph that somebody
keeps, or that waits for the garbage collector, makes no difference. Forwards in training mode count, and those in eval
mode that a backward may follow. A backward for which no rows are kept any more is an error if ids have been evicted in
the meantime.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from recfx.errors import ConversionError, InputError
from recfx.hashing import HashIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.index.hash_index import InFlight
from recfx.kernels.index.index_buffers import BATCHES, EVICTED
from recfx.runtime.marks import give_up

_NO_BACKWARD = -1  # torch's number of the running backward, when there is none
_on_a_copy: ContextVar[bool] = ContextVar("on_a_copy", default=False)


@contextlib.contextmanager
def on_a_copy() -> Iterator[None]:
    """Allow a temporary copy to train unsharded on several ranks: it only serves for a comparison on this rank."""
    token = _on_a_copy.set(True)
    try:
        yield
    finally:
        _on_a_copy.reset(token)


def is_replay() -> bool:
    """Whether activation checkpointing runs this forward again, inside the backward. Its ids are not counted again."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


def refuse_replicas(collection: str, hashed: tuple[str, ...]) -> None:
    """Raise a ``ConversionError``, ``unsharded_hash_table``, if several ranks train separate indexes."""
    if not _on_a_copy.get() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConversionError(
            f"tables {list(hashed)} have an index and train unsharded on {dist.get_world_size()} "
            "ranks: each rank would give the same id another row, and the replicas would diverge.",
            reason="unsharded_hash_table",
            module_path=collection,
            what_to_do="shard the collection, or adopt the tables (HashConfig() with dense ids).",
        )


def refuse_fused_replicas(collection: str, fused: list[str]) -> None:
    """Raise a ``ConversionError``, ``unsharded_fused_optimizer``, inside ``DistributedDataParallel`` on several ranks.
    DDP averages gradients, but a table that is updated inside the lookup's backward does not have one.
    """
    around = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if _on_a_copy.get() or around is None or around.process_group.size() == 1:
        return
    raise ConversionError(
        f"tables {fused} are unsharded inside a DistributedDataParallel and have an optimizer in backward: it would "
        "step on this rank's gradients alone, and the replicas would diverge.",
        reason="unsharded_fused_optimizer",
        module_path=collection,
        what_to_do="shard the collection (recfx.convert(model, plan=...) or DistributedModelParallel), or step its "
        "tables with an ordinary optimizer, whose gradients are averaged.",
    )


BATCHES_IN_FLIGHT = 2
"""For how many later forwards a batch keeps its rows by default. TorchRec's pipelines need one."""


class BatchInFlight:
    """One batch whose gradients may still come, and the tables that evict. ``kept_until`` is the number of the last
    forward in which its rows must keep their ids; ``kept`` has, by table, the number of the batch in the table's index
    and these rows. In the ``group`` of a sharded collection, a rank sends nothing more after a backward that it has
    refused.
    """

    def __init__(
        self,
        collection: str,
        kept_until: int,
        tables: Sequence[tuple[TableSpec, HashIndex]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.kept_until = kept_until
        self._collection, self._group = collection, group
        self._names = {table.name: table.table_name for table, _ in tables}
        self._indexes = {table.name: index for table, index in tables}
        self.kept: dict[str, tuple[int, torch.Tensor]] = {}
        self._evicted: dict[str, int] | None = None  # by each table, up to when the batch let its rows go
        for index in self._indexes.values():
            index.refresh()  # a state that was loaded in place has other counts
        self._watched = 0
        self._waiting: set[int] = set()  # lookups whose backward has not run yet

    def keep(self, rows: Mapping[str, torch.Tensor], training: bool) -> None:
        """Keep the rows of tables that evict: int64, by table. In training, the indexes have just counted the batch."""
        self.kept = {
            name: (int(index.counts[BATCHES]) if training else 0, rows[name])
            for name, index in self._indexes.items()
            if name in rows
        }

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Let the rows go once a backward through the outputs of each lookup that was watched has run."""
        nodes = nodes_of(outputs)
        if not nodes:
            return
        lookup = self._watched
        self._watched += 1
        self._waiting.add(lookup)
        for node in nodes:
            node.register_prehook(self._before_backward)
            node.register_hook(lambda *gradients: self._after_backward(lookup))

    def end(self) -> None:
        if self._evicted is None:
            self.kept, self._evicted = {}, self._counts()

    def lost(self) -> list[str]:
        """The tables that have evicted ids since the batch let its rows go."""
        if self._evicted is None:
            return []
        counts = self._counts()
        return sorted({self._names[name] for name, count in self._evicted.items() if counts[name] != count})

    def _counts(self) -> dict[str, int]:
        return {name: int(index.counts[EVICTED]) for name, index in self._indexes.items()}

    def _before_backward(self, *gradients: Any) -> None:
        lost = self.lost()
        if lost:
            error = backward_after_eviction(self._collection, lost)
            if self._group is not None:
                give_up(self._group, self._collection, error)
            raise error

    def _after_backward(self, lookup: int) -> None:
        self._waiting.discard(lookup)
        if not self._waiting:
            self.end()


class BatchesInFlight:
    """All batches of one collection that are in flight. Copies of a collection have none: graphs are the original's."""

    def __init__(self, depth: int = BATCHES_IN_FLIGHT) -> None:
        self.depth = depth  # for how many later forwards a batch keeps its rows
        self.turn = 0  # the number of forwards before the one that is under way
        self._batches: list[BatchInFlight] = []

    def __reduce__(self) -> Any:
        return BatchesInFlight, (self.depth,)

    def add(self, batch: BatchInFlight) -> None:
        self._batches.append(batch)

    def begin(self) -> None:
        """Call before a forward hashes its ids: batches that are too old let go of their rows."""
        for batch in self._batches:
            if self.turn > batch.kept_until:
                batch.end()
        self._batches = [batch for batch in self._batches if batch.kept]

    def of_table(self, table: str) -> InFlight:
        nothing = InFlight.nothing()
        kept = [batch.kept[table] for batch in self._batches if table in batch.kept]
        if not kept:
            return nothing
        numbers, rows = zip(*kept, strict=True)
        return nothing._replace(rows=torch.cat(rows), oldest_listed=min(numbers))


def guard_backward(outputs: Iterable[torch.Tensor], indexes: list[HashIndex], collection: str) -> None:
    """Make the backward of a lookup's ``outputs`` raise if one of its ``indexes`` has removed ids by then. The backward
    raises an ``InputError``, ``backward_after_removal``, before anything is updated.
    """
    nodes = nodes_of(outputs)
    if not nodes or not indexes:
        return
    before = [index.removals for index in indexes]

    def check(*gradients: Any) -> None:
        now = [index.removals for index in indexes]
        if now != before:
            changed = next(index.name for index, old, new in zip(indexes, before, now, strict=True) if old != new)
            raise InputError(
                f"the backward of a batch of table {changed!r}: ids were removed from its index since the forward, "
                "and their rows may have gone to other ids.",
                reason="backward_after_removal",
                module_path=collection,
                what_to_do="call HashIndex.erase and HashIndex.insert after the backward, not before it.",
            )

    for node in nodes:
        node.register_prehook(check)


def nodes_of(outputs: Iterable[torch.Tensor]) -> list[Any]:
    """Autograd's nodes of a lookup's outputs, which may share one. Empty without gradients."""
    return list(dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None))


def backward_after_eviction(collection: str, tables: Sequence[str]) -> InputError:
    """The error of a backward that comes after ids of these tables have been evicted."""
    return InputError(
        f"a backward through a batch of tables {list(tables)} comes too late: ids have been evicted since the batch "
        "was free to lose its rows (after an earlier backward, or more later forwards than the collection's "
        "batches_in_flight), and other ids may have them. Nothing was trained.",
        reason="backward_after_eviction",
        module_path=collection,
        what_to_do="run all backwards of a batch before the next batch's forward; to accumulate the losses of several "
        "forwards, set batches_in_flight of the collection to their number, on all ranks.",
    )
