"""The conditions under which a collection may be trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from recfx.errors import ConversionError, InputError

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


def refuse_replay(collection: str) -> None:
    """Raise an ``InputError``, ``activation_checkpointing``, in a forward that runs again.

    For collections with tables that evict or admit ids: their ids may have other rows by then.
    """
    if is_replay():
        raise InputError(
            "a forward runs inside a backward, as with activation checkpointing, but tables of the collection evict "
            "or admit ids: the rows of the first run may be gone.",
            reason="activation_checkpointing",
            module_path=collection,
            what_to_do="leave the collection out of the checkpoint.",
        )


def refuse_replicas(collection: str, hashed: tuple[str, ...]) -> None:
    """Raise a ``ConversionError``, ``unsharded_hash_table``, if several ranks train separate indexes."""
    distributed = torch.distributed
    if _on_a_copy.get():
        return
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ConversionError(
            f"tables {list(hashed)} have an index and train unsharded on {distributed.get_world_size()} "
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
