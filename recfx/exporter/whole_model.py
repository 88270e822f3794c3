"""The model that an export is about, as a whole on one rank, whatever is around it and however it is sharded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import nn

from recfx.collections.copy_modules import refuse_fully_sharded
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.gather import WholeTable, gather_tables
from recfx.collections.sharding.ranks_agree import group_of_model, on_all_ranks
from recfx.collections.whole_graph import WholeGraph, refuse_graph
from recfx.collections.wrappers import unwrap
from recfx.errors import ExportError, RecfxError
from recfx.exporter.model_copies import on_host
from recfx.models.sample import Sample

ONE_AT_A_TIME = threading.RLock()
"""An export patches classes of torch and TorchRec."""


def exported_root(model: nn.Module) -> nn.Module:
    """The module that is exported, inside its wrappers."""
    refuse_graph(model, ExportError)
    root = model.python_model if isinstance(model, WholeGraph) else unwrap(model)
    refuse_fully_sharded(
        root,
        "load the weights, with torch.distributed.checkpoint, into a model on which it was not called, and export that "
        "one; or call recfx.export first and fully_shard afterwards.",
    )
    return root


def group_of_root(root: nn.Module, name: str) -> dist.ProcessGroup | None:
    """The process group of its collections, once all ranks call the function ``name``. Collective."""
    return group_of_model(
        root,
        ExportError,
        call=name,
        if_several="shard all collections in one process group, or save a checkpoint and export that.",
        if_sharded_alone="convert the model before it is sharded.",
    )


def check_on_ranks(group: dist.ProcessGroup | None, check: Callable[[], list[str]], name: str) -> None:
    """Call ``check``, which returns the arguments of ``name`` as texts, on all ranks (``ranks_differ``)."""
    passed = on_all_ranks(group, check, as_sent)
    if any(of_rank != passed[0] for of_rank in passed):
        raise ExportError(
            f"the ranks export with different arguments: {passed}.",
            reason="ranks_differ",
            what_to_do=f"call {name} with the same arguments on all ranks.",
        )


def gathered_tables(root: nn.Module) -> dict[str, dict[str, WholeTable]]:
    """The tables of sharded collections, by path and name, on rank 0; the others hold one or two at a time."""
    return {
        where: gather_tables(collection, on_rank=0, with_optimizers=False)
        for where, collection in sharded_collections(root).items()
    }


def whole_model(
    root: nn.Module, call: Sample, group: dist.ProcessGroup | None, gathered: Mapping[str, Mapping[str, WholeTable]]
) -> tuple[nn.Module, Sample]:
    """The model around the gathered tables, and the call, on the host, without what communicates; if nothing is
    sharded, they are as they were.
    """
    if group is None:
        return root, call
    whole, call = on_host(root, call, gathered)
    for module in list(whole.modules()):
        for name, child in module._modules.items():
            if isinstance(child, nn.parallel.DistributedDataParallel):
                module._modules[name] = unwrap(child)
    return whole, call


def refuse_meta(kind: str) -> None:
    """Refuse a model whose tables are on this kind of device, if that is meta (``model_on_meta``)."""
    if kind == "meta":
        raise ExportError(
            "the model's tables are on meta, so there are no rows to write.",
            reason="model_on_meta",
            what_to_do="load the model first; export also takes checkpoint=, a directory of save_checkpoint.",
        )


def as_sent(error: BaseException) -> Exception:
    """What the other ranks raise for an error on one of them."""
    if isinstance(error, RecfxError):
        return error
    return ExportError(
        f"a rank failed: {type(error).__name__}: {error}",
        reason="other_rank_failed",
        what_to_do="see the error on that rank; nothing was written.",
    )
