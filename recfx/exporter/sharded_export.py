"""Exports a sharded model from all its ranks: rank 0 gathers the tables, and exports the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.gather import gather_tables
from recfx.collections.sharding.ranks_agree import group_of_model, on_all_ranks
from recfx.collections.wrappers import unwrap
from recfx.discovery.sample import Sample
from recfx.errors import ExportError, RecfxError
from recfx.exporter.model_copies import on_host

_Result = TypeVar("_Result")


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

    def as_sent(error: BaseException) -> Exception:
        if isinstance(error, RecfxError):
            return error
        return ExportError(
            f"rank {rank} failed: {type(error).__name__}: {error}",
            reason="other_rank_failed",
            what_to_do="see the error on that rank; nothing was written.",
        )

    return on_all_ranks(group, function, as_sent)


def export_from_ranks(
    model: nn.Module,
    group: dist.ProcessGroup,
    sample: Sample,
    arguments: Mapping[str, Any],
    check: Callable[[], None],
    export: Callable[[nn.Module, Sample], _Result],
) -> _Result:
    """Export a sharded model, and return what ``export`` returned on rank 0. Collective.

    Rank 0 holds all tables as a whole meanwhile; each of the others one or two at a time.

    Args:
        model: the model on this rank, without wrappers.
        group: the ranks that hold its tables.
        sample: one call of the model; that of rank 0 counts.
        arguments: what all ranks must have passed alike.
        check: checks on rank 0 whether there can be a file.
        export: writes the file on rank 0, given the unsharded model and the call, both on the host. Its error, like any
            other, is raised on all ranks.
    """

    def check_alike() -> None:
        for rank, passed in enumerate(by_rank):
            for name, value in passed.items():
                if value != by_rank[0][name]:
                    raise ExportError(
                        f"rank {rank} exports with {name}={value}, rank 0 with {name}={by_rank[0][name]}.",
                        reason="ranks_differ",
                        what_to_do="call export with the same arguments on all ranks.",
                    )

    def on_first() -> _Result | None:
        if group.rank() != 0:
            return None
        whole, call = on_host(model, sample, gathered)
        _drop_replicas(whole)
        return export(whole, call)

    by_rank = agree(group, lambda: {key: _text(value) for key, value in arguments.items()})
    agree(group, check_alike)
    agree(group, lambda: check() if group.rank() == 0 else None)
    gathered = {
        path: gather_tables(collection, on_rank=0, with_optimizers=False)
        for path, collection in sharded_collections(model).items()
    }
    result: Any = agree(group, on_first)[0]
    return result


def _text(argument: Any) -> str:
    """A text that is the same for equal arguments, whatever the order of a dict."""
    return str(dict(sorted(argument.items(), key=str)) if isinstance(argument, Mapping) else argument)


def _drop_replicas(copy: nn.Module) -> None:
    """Put what ``DistributedDataParallel``, which communicates, is around into its place."""
    for module in list(copy.modules()):
        for name, child in module._modules.items():
            if isinstance(child, nn.parallel.DistributedDataParallel):
                module._modules[name] = unwrap(child)
