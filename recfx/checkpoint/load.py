"""``recfx.load_checkpoint``: everything is checked before anything is changed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.optim.warmup import WarmupOptimizer

from recfx.argument_types import typed
from recfx.checkpoint.contents import MODEL, check_names, with_prefix
from recfx.checkpoint.directory import locked, told_as
from recfx.checkpoint.in_backward import FusedPlan, attached_to, fused_tables
from recfx.checkpoint.manifest import Manifest, missing, torn
from recfx.checkpoint.model_plan import ModelPlan, plan_model, refused_as
from recfx.checkpoint.ordinary import (
    Stepped,
    load_state,
    load_warm_ups,
    other_optimizer,
    plan_warm_ups,
    rebuild_state,
    stepped_by,
    unwrap_optimizer,
)
from recfx.checkpoint.peers import Peers, checked_directory, checked_model
from recfx.checkpoint.saved_optimizers import STEP_AS_SAVED, SavedOptimizers
from recfx.checkpoint.settings import read_settings
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.table_names import prefix_of
from recfx.checkpoint.tables import tables_of
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.sharding.collection import ShardedCollection
from recfx.errors import CheckpointError, Diagnostic, Severity, few, with_article

_log = logging.getLogger("recfx")


@typed(CheckpointError, left=("optimizer",))
def load_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    in_backward: bool = True,
) -> None:
    """Load what ``save_checkpoint`` saved: training continues bit for bit as if it had never stopped.

    Files, names, shapes, dtypes and indexes are checked first: after an error, the model, its indexes and its
    optimizers are as they were. A file is as trusted as by ``torch.load(weights_only=True)``. Three things can leave
    a mixture of old and new: a disk that fails between the check and the reading of weights (the message says
    so), a load hook of the user that raises, and an interrupt (Ctrl-C) during loading. If that happens, load again;
    until then, a table with an index whose rows may have changed cannot be used (``load_interrupted``).

    Example:
        >>> model = recfx.convert(Model())
        >>> recfx.save_checkpoint(model, "run")
        >>> again = recfx.convert(Model())
        >>> recfx.load_checkpoint(again, "run")
        >>> torch.equal(again.ebc.weight("users"), model.ebc.weight("users"))
        True

    Args:
        model: built and converted as when saving. Tables with an index may have more rows: ids move to their bucket's
            rows, and weights and fused state move with them. Its collections may be sharded under any plan, over any
            number of ranks, or not at all, whatever they were when saving; if they are sharded, all ranks call this.
            What was saved of a parameter's optimizer goes to whatever steps the parameter now, in backward or as
            ``optimizer``, if it is of the same kind. One thing is not exact: row-wise Adagrad's state, if the column
            blocks differ from those that were saved, is the mean over the saved blocks. If nothing was saved of it, an
            optimizer in backward begins anew, and the first rank logs a warning (``optimizer_state_missing``).
        directory: as given to ``save_checkpoint``.
        optimizer: an ordinary optimizer to load as well; without it, an optimizer that was saved is ignored, and the
            first rank logs a warning (``optimizer_not_loaded``). A parameter that had other settings in backward has
            those of its group now, and a warning (``optimizer_settings_differ``).
        in_backward: False leaves optimizers in backward alone, for example if the model will only be evaluated; then
            nothing is logged either.

    Raises:
        CheckpointError: ``checkpoint_missing``, ``checkpoint_torn``, ``checkpoint_version``, ``checkpoint_busy``,
            ``checkpoint_unreadable`` (an error of the disk), ``checkpoint_mismatch`` (a different model, with what
            differs, or a table that has an index on one side only), ``model_on_meta``, ``model_is_lazy``,
            ``value_not_supported`` (a buffer of the model that nothing can be loaded into, such as an expanded one),
            ``model_is_sharded`` (by TorchRec alone), ``model_parallel_inside`` (around a part of the model),
            ``several_process_groups``, ``no_process_group`` (it was destroyed), ``optimizer_not_supported``,
            ``invalid_argument``, ``bucket_too_small``, ``other_rank_failed``, or what is wrong with an index. On all
            ranks.
    """
    _load_checked(model, directory, optimizer, in_backward, "")


def load_part(model: nn.Module, directory: str | os.PathLike[str], submodule: str) -> None:
    """Load what was saved of one submodule, without optimizers, into a model that is not sharded.

    Args:
        model: built and converted as that submodule was when saving.
        directory: as given to ``save_checkpoint``.
        submodule: its path, where names of wrappers may be left out; empty for the whole model.

    Raises:
        CheckpointError: as ``load_checkpoint``; ``checkpoint_mismatch`` also if there is no such submodule.
    """
    _load_checked(model, directory, None, False, submodule)


def _load_checked(
    model: nn.Module,
    directory: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None,
    in_backward: bool,
    submodule: str,
) -> None:
    root, peers = checked_model(model, "load_checkpoint")
    path, if_different = checked_directory(directory, peers)
    consequence = ["Nothing was loaded."]
    what_to_do = if_different or "make sure that the files can be read, and load again; or use another checkpoint."
    with told_as("checkpoint_unreadable", path, lambda: consequence[-1], what_to_do):
        try:
            _load(root, path, optimizer, in_backward, submodule, consequence, peers)
            for _, module in collections_by_prefix(root, ShardedCollection):
                for start in module.input_dists():
                    start.forget_backwards()
        except CheckpointError as error:
            if not if_different or error.reason != "checkpoint_torn":
                raise
            raise CheckpointError(error.message, reason=error.reason, what_to_do=if_different) from error


def _load(
    root: nn.Module,
    path: Path,
    optimizer: torch.optim.Optimizer | None,
    in_backward: bool,
    submodule: str,
    consequence: list[str],
    peers: Peers,
) -> None:
    """Load; ``consequence`` gets what is true of the model if the disk fails from here on."""
    with contextlib.ExitStack() as lock:

        def begin() -> str:  # the first rank locks and verifies for all
            if not path.is_dir():
                raise missing(path)
            lock.enter_context(locked(path, shared=True))
            manifest = Manifest.read(path)
            manifest.verify(path)
            return manifest.data

        folder = SavedFolder(path / str(peers.first(begin)))
        plans: list[_Plans] = []

        def plan() -> tuple[tuple[bool, bool], list[Diagnostic]]:
            if not folder.path.is_dir():
                raise torn(folder.path, "it is missing")
            plans.append(_plan(root, folder, optimizer, in_backward, submodule))
            return (optimizer is None, in_backward), plans[0].notes

        of_ranks = peers.agree(plan)
        if len({given for given, _ in of_ranks}) > 1:
            raise CheckpointError(
                "optimizer= or in_backward= is not the same on all ranks: some would train on from another state.",
                reason="invalid_argument",
                what_to_do="pass an optimizer on all ranks, or on none, and the same in_backward=.",
            )
        try:
            peers.agree(lambda: plans[0].begin())
        except BaseException:
            plans[0].undo()
            raise
        consequence.append("The model may hold a mixture of old and new.")
        peers.agree(lambda: plans[0].carry_out(folder))
        for note in dict.fromkeys(note for _, notes in of_ranks for note in notes) if peers.is_first else ():
            _log.warning("%s", note)


@dataclass
class _Plans:
    """Everything that is to be done on this rank, checked.

    Args:
        model: the plan for parameters and indexes.
        fused: the plans for fused optimizers.
        optimizers: other optimizers, in backward or ordinary, and the states for them.
        warm_ups: TorchRec's warm-ups, and the states for them.
        notes: what the user should know about optimizers.
    """

    model: ModelPlan
    fused: list[FusedPlan]
    optimizers: list[tuple[torch.optim.Optimizer, dict[str, Any]]]
    warm_ups: list[tuple[WarmupOptimizer, list[int]]]
    notes: list[Diagnostic]
    done: list[Callable[[], None]] = field(default_factory=list)

    def begin(self) -> None:
        """Load what foreign code takes and may refuse: an ordinary optimizer, and extra states of modules.

        Raises:
            CheckpointError: ``checkpoint_mismatch``.
        """
        for optimizer, state in self.optimizers:
            with refused_as("the optimizer", "optimizer"):
                self.done.append(load_state(optimizer, state))
        self.model.begin(self.done)

    def undo(self) -> None:
        while self.done:
            self.done.pop()()

    def carry_out(self, folder: SavedFolder) -> None:
        """Load the rest. Everything has been checked; what can still fail is the disk."""
        with torch.no_grad():
            self.model.carry_out()
            for plan in self.fused:
                plan.carry_out(folder)
            load_warm_ups(self.warm_ups)  # last, as they set learning rates


def _plan(
    root: nn.Module,
    folder: SavedFolder,
    optimizer: torch.optim.Optimizer | None,
    in_backward: bool,
    submodule: str,
) -> _Plans:
    settings = read_settings(folder)
    extra = settings["extra_state"]
    names = [*with_prefix(folder.described, MODEL), *extra]
    prefix = prefix_of(submodule, root.state_dict(), names) if submodule else ""
    plan = plan_model(root, folder, with_prefix(extra, prefix), MODEL + prefix)
    saved = SavedOptimizers.of(settings, folder.described)
    inner = None if optimizer is None else unwrap_optimizer(optimizer)
    stepped = [] if inner is None else stepped_by(inner, root)
    tables, attached = fused_tables(root), attached_to(root)
    of_backward = [*(table.weight for table, _ in tables), *(of_parameter.name for of_parameter in attached)]
    ordinary = None if inner is None else [of_parameter.name for of_parameter in stepped]
    _check_all_taken(root, saved, ordinary, of_backward, in_backward)
    fused: list[FusedPlan] = []
    optimizers: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
    notes: list[Diagnostic] = []
    if in_backward:
        fused = [
            FusedPlan(table, settings_here, saved.entries.get(table.weight), plan.moves.get(table.weight))
            for table, settings_here in tables
        ]
        for of_parameter in attached:
            alone = [Stepped(of_parameter.parameter, of_parameter.name, None)]
            state, _ = rebuild_state(of_parameter.optimizer, alone, folder, saved, plan.moves)
            optimizers.append((of_parameter.optimizer, state))
        notes += _without_state([name for name in of_backward if name not in saved.entries])
    if optimizer is not None and inner is not None:
        state, notes_of_settings = rebuild_state(inner, stepped, folder, saved, plan.moves, of_backward)
        optimizers.append((optimizer, state))
        notes += notes_of_settings
    warm_ups = [] if optimizer is None else plan_warm_ups(optimizer, settings["warm_ups"])
    for of_table in fused:
        of_table.check()
    for of_table in fused:
        of_table.prepare()
    if inner is None and in_backward:
        notes += _not_loaded(saved, set(of_backward))
    return _Plans(plan, fused, optimizers, warm_ups, notes)


def _check_all_taken(
    root: nn.Module, saved: SavedOptimizers, ordinary: list[str] | None, of_backward: list[str], in_backward: bool
) -> None:
    """Check that what was saved of optimizers is taken here, and that those here find theirs.

    Args:
        root: the model without wrappers.
        saved: the optimizers that were saved.
        ordinary: the parameters that an ordinary optimizer steps; None if there is none.
        of_backward: the parameters that are stepped in backward.
        in_backward: whether optimizers in backward are loaded.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    elsewhere = [table.weight for table in tables_of(root) if ordinary is not None and not table.here]  # other ranks
    taken = {*(ordinary or ()), *of_backward, *elsewhere}
    left = sorted(name for name, entry in saved.entries.items() if entry.group is None and name not in taken)
    if in_backward:
        check_names("an optimizer in backward for ", [], left, STEP_AS_SAVED)
    if ordinary is None:
        return
    missing = [name for name in ordinary if name not in saved.entries and name not in of_backward]
    if missing and not saved.groups:
        raise other_optimizer("the checkpoint was saved without optimizer=.", "load it without optimizer= as well.")
    left = sorted(name for name, entry in saved.entries.items() if entry.group is not None and name not in taken)
    if missing or left:
        here = f"no optimizer that was saved stepped {few(missing, 10)}" if missing else ""
        there = f"the saved optimizer stepped {few(left, 10)}, which no optimizer does here" if left else ""
        raise other_optimizer(f"{'; '.join(filter(None, [here, there]))}.")


def _not_loaded(saved: SavedOptimizers, taken: set[str]) -> list[Diagnostic]:
    """What is said of an ordinary optimizer that was saved and is not asked for."""
    if not saved.ordinary_kind or taken >= saved.ordinary:
        return []
    message = (
        f"the checkpoint has {with_article(saved.ordinary_kind)}, whose state was not loaded, as optimizer= was not "
        "given."
    )
    what_to_do = (
        "to continue training, load again with optimizer=; if the model will only be evaluated, in_backward=False says "
        "so."
    )
    return [Diagnostic("optimizer_not_loaded", "optimizer", message, what_to_do, Severity.WARNING)]


def _without_state(names: list[str]) -> list[Diagnostic]:
    """What is said of parameters whose optimizer in backward takes no state, as none was saved."""
    if not names:
        return []
    message = f"no optimizer that was saved had stepped {few(names, 3)}: in backward, it begins anew."
    what_to_do = "if an ordinary optimizer steps data-parallel tables, as TorchRec lets one do, save with optimizer=."
    return [Diagnostic("optimizer_state_missing", "optimizer", message, what_to_do, Severity.WARNING)]
