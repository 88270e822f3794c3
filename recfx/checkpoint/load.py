"""``recfx.load_checkpoint``: everything is checked before anything is changed.

What is no table is read into separate memory and checked, and so are indexes. Weights of tables, and the state of fused
optimizers, would not all fit into memory twice: they are read in place, once everything else is known to be right.
"""

import contextlib
import copy
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from recfx.checkpoint.contents import (
    BUILD_AS_SAVED,
    MODEL,
    check_names,
    check_saved_as,
    check_tensor,
    mismatch,
    refused_as,
    with_prefix,
)
from recfx.checkpoint.directory import Manifest, disk_errors, locked, missing, torn
from recfx.checkpoint.load_optimizers import (
    STEP_AS_SAVED,
    SavedOptimizer,
    load_state,
    plan_fused,
    plan_warm_ups,
    rebuild_state,
    saved_optimizers,
    warning,
)
from recfx.checkpoint.optimizers import Stepped, attached_to, fused_tables, stepped_by, unwrap_optimizer
from recfx.checkpoint.peers import checked_arguments
from recfx.checkpoint.storage import SavedFolder, read_settings
from recfx.checkpoint.tables import Table, plan_tables, tables_of
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.wrappers import without_wrappers
from recfx.errors import CheckpointError, Diagnostic, few, with_article
from recfx.errors.argument_types import typed
from recfx.hashing.identity import IDENTITY
from recfx.hashing.row_move import RowMove
from recfx.hashing.state import EVERY_NAME

_log = logging.getLogger("recfx")
_EXTRA_STATE = "_extra_state"  # torch's name for what modules save by themselves; it may have any shape
_OPTIONAL = tuple(name for name in EVERY_NAME if name not in ("row_ids", "row_state", IDENTITY))


class Plan:
    """What is to be done to load a checkpoint on this rank; everything has been checked."""

    def __init__(self) -> None:
        # What gives values to foreign code, which may refuse them: each adds to what it gets how it is undone.
        self.refusable: list[Callable[[contextlib.ExitStack], None]] = []
        self.rest: list[Callable[[], None]] = []  # loads everything else; what can still fail is the disk
        self.moves: dict[str, RowMove] = {}  # of tables that have more rows than saved, by weight name
        self.notes: list[Diagnostic] = []  # what the user should know about optimizers

    def load_refusable(self, undo: contextlib.ExitStack) -> None:
        for load in self.refusable:
            load(undo)

    def load_rest(self) -> None:
        with torch.no_grad():
            for load in self.rest:
                load()


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
    optimizers are as they were. A file is as trusted as by ``torch.load(weights_only=True)``. Three things can leave a
    mixture of old and new: a disk that fails while weights of tables are read, a load hook that raises, and Ctrl-C. If
    that happens, load again; until then, a table with an index that may have changed cannot be used
    (``load_interrupted``).

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
            What was saved of a parameter's optimizer goes to whatever steps it now, if that is of the same kind; if
            nothing was saved, one in backward begins anew, with a warning (``optimizer_state_missing``). One thing is
            not exact: row-wise Adagrad's state, if the column blocks differ, is the mean over those that were saved.
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
    load_part(model, directory, "", optimizer, in_backward)


def load_part(
    model: nn.Module,
    directory: str | os.PathLike[str],
    submodule: str,
    optimizer: torch.optim.Optimizer | None = None,
    in_backward: bool = False,
) -> None:
    """Load what was saved of one submodule, which ``model`` is; see ``load_checkpoint`` for the rest.

    ``submodule`` is its path, where names of wrappers may be left out; empty for the whole model.
    """
    root, path, peers = checked_arguments(model, directory, "load_checkpoint")
    what_to_do = "make sure that the files can be read, and load again; weights may be old and new until then."
    plans: list[Plan] = []
    with disk_errors("checkpoint_unreadable", path, what_to_do), contextlib.ExitStack() as lock:

        def begin() -> str:  # the first rank locks and verifies for all
            if not path.is_dir():
                raise missing(path)
            lock.enter_context(locked(path, shared=True))
            manifest = Manifest.read(path)
            manifest.verify(path)
            return manifest.data

        folder = SavedFolder(path / str(peers.first(begin)))

        def plan() -> tuple[tuple[bool, bool], list[Diagnostic]]:
            if not folder.path.is_dir():
                raise torn(folder.path, "it is missing; all ranks must name one shared directory")
            plans.append(_plan(root, folder, optimizer, in_backward, submodule))
            return (optimizer is None, in_backward), plans[0].notes

        of_ranks = peers.agree(plan)
        if len({given for given, _ in of_ranks}) > 1:
            raise CheckpointError(
                "optimizer= or in_backward= is not the same on all ranks: some would train on from another state.",
                reason="invalid_argument",
                what_to_do="pass an optimizer on all ranks, or on none, and the same in_backward=.",
            )
        with contextlib.ExitStack() as undo:
            peers.agree(lambda: plans[0].load_refusable(undo))
            undo.pop_all()
        peers.agree(plans[0].load_rest)
    for note in dict.fromkeys(note for _, notes in of_ranks for note in notes) if peers.is_first else ():
        _log.warning("%s", note)
    for _, module in collections_by_prefix(root, ShardedCollection):
        for start in module._input_dists:
            start.backwards.forget()


def _plan(root: nn.Module, folder: SavedFolder, optimizer: Any, in_backward: bool, submodule: str) -> Plan:
    settings = read_settings(folder)
    extra = settings["extra_state"]
    names = [*with_prefix(folder.described, MODEL), *extra]
    prefix = _prefix_of(submodule, root.state_dict(), names) if submodule else ""
    plan = _plan_model(root, folder, with_prefix(extra, prefix), MODEL + prefix)
    saved, ordinary = saved_optimizers(settings, folder), settings["optimizer"]
    groups = ordinary["groups"] if ordinary else []
    inner = unwrap_optimizer(optimizer)
    stepped = [] if inner is None else stepped_by(inner, root)
    tables, attached = fused_tables(root), attached_to(root)
    of_backward = [*(table.weight for table, _ in tables), *(name for name, _, _ in attached)]
    _check_all_taken(root, saved, None if inner is None else [one.name for one in stepped], of_backward, in_backward)
    states: list[tuple[Any, dict[str, Any]]] = []
    if in_backward:
        for table, fused in tables:
            plan.rest.append(plan_fused(table, fused, saved.get(table.weight), plan.moves.get(table.weight)))
        for name, parameter, of_parameter in attached:
            state, _ = rebuild_state(of_parameter, [Stepped(parameter, name)], saved, groups, plan.moves)
            states.append((of_parameter, state))
        if unknown := [name for name in of_backward if name not in saved]:
            message = f"no optimizer that was saved had stepped {few(unknown, 3)}: in backward, it begins anew."
            advice = (
                "if an ordinary optimizer steps data-parallel tables, as TorchRec lets one do, save with optimizer=."
            )
            plan.notes.append(warning(code="optimizer_state_missing", message=message, what_to_do=advice))
    if inner is not None:
        state, of_settings = rebuild_state(inner, stepped, saved, groups, plan.moves, of_backward)
        states.append((optimizer, state))
        plan.notes += of_settings
    elif in_backward and {name for group in groups for name in group["params"]}.difference(of_backward):
        kind = with_article(ordinary["kind"])
        message = f"the checkpoint has {kind}, whose state was not loaded, as optimizer= was not given."
        advice = "to continue training, load again with optimizer=; for evaluation alone, pass in_backward=False."
        plan.notes.append(warning(code="optimizer_not_loaded", message=message, what_to_do=advice))
    plan.refusable[:0] = [functools.partial(load_state, *pair) for pair in states]
    plan.rest.append(plan_warm_ups(optimizer, {} if optimizer is None else settings["warm_ups"]))  # they set rates
    for table, _ in tables if in_backward else ():  # allocates, before anything is changed
        for shard, weight in zip(table.here, table.weights, strict=True):
            table.fused_of(shard).prepare(weight)
    return plan


def _check_all_taken(
    root: nn.Module,
    saved: Mapping[str, SavedOptimizer],
    ordinary: Collection[str] | None,
    of_backward: Collection[str],
    in_backward: bool,
) -> None:
    """Check that what was saved of optimizers is taken here, and that those here find theirs.

    An ordinary optimizer steps the parameters ``ordinary``, None if there is none; ``of_backward`` are stepped in
    backward, by optimizers that are loaded if ``in_backward``.
    """
    elsewhere = [table.weight for table in tables_of(root) if ordinary is not None and not table.here]  # other ranks
    taken = {*(ordinary or ()), *of_backward, *elsewhere}
    to_take = [name for name in saved if in_backward and saved[name].group is None and name not in taken]
    check_names("an optimizer in backward for ", [], to_take, STEP_AS_SAVED)
    if ordinary is not None:
        to_take = sorted(name for name in saved if name in taken or saved[name].group is not None)
        here = [name for name in taken if name in saved or (name in ordinary and name not in of_backward)]
        check_names("an optimizer of ", here, to_take, STEP_AS_SAVED, module_path="optimizer")


def _plan_model(model: nn.Module, folder: SavedFolder, extra_state: Mapping[str, Any], start: str = MODEL) -> Plan:
    """Check the saved model, whose names begin with ``start``, against this one without wrappers. Changes nothing."""
    tables, saved, plan = tables_of(model), with_prefix(folder.described, start), Plan()
    with contextlib.ExitStack() as stack:  # even after an interrupted load, names and shapes are right
        for index in {index for table in tables for index in table.indexes}:
            stack.enter_context(index.readable())
        state = model.state_dict()
    names = _loaded_names(tables, state, saved, extra_state)
    of_tables = plan_tables(tables, folder, saved, start)
    plan.moves = {of_table.table.weight: of_table.move for of_table in of_tables if of_table.move is not None}
    planned = {key for table in tables for key in (table.weight, *table.index_keys.values())}
    tensors = [name for name in names if name not in planned and name not in extra_state]
    for name in tensors:
        if not name.endswith(_EXTRA_STATE):
            check_tensor(name, state[name])
            shape = tuple(state[name].shape)
            check_saved_as(name, saved[name], state[name].dtype, shape, shape)
    loaded = {**with_prefix(folder.read([start + name for name in tensors]), start), **extra_state}

    def load_extra_states(undo: contextlib.ExitStack) -> None:
        for path, module in model.named_modules():
            name = f"{path}." * bool(path) + _EXTRA_STATE
            if name in loaded and type(module).set_extra_state is not nn.Module.set_extra_state:
                undo.callback(module.set_extra_state, copy.deepcopy(module.get_extra_state()))
                with refused_as(f"the {type(module).__name__}", path):
                    module.set_extra_state(loaded[name])

    def load() -> None:
        model.load_state_dict(loaded, strict=False)  # tables are not in it, and it says that indexes stay as they are
        for of_table in of_tables:
            of_table.expect_load()
        for of_table in of_tables:
            of_table.carry_out(folder)

    plan.refusable.append(load_extra_states)
    plan.rest.append(load)
    return plan


def _loaded_names(
    tables: list[Table], state: Collection[str], saved: Collection[str], extra_state: Collection[str]
) -> list[str]:
    """The names in the model's ``state_dict`` that are to be loaded; all of them, and no others, must be saved.

    Some keys of an index are needed under some policies only: an index loads without them, as
    ``state.buffers_from_state`` says, and does not use those that it does not need.
    """
    optional = {
        f"{table.prefix}hash_indexes.{table.name}.{name}"
        for table in tables
        for name in _OPTIONAL
        if table.spec.has_index
    }
    loaded = [name for name in state if name not in optional or name in saved]
    used = [name for name in saved if name not in optional or name in state]
    what_to_do = BUILD_AS_SAVED
    if any("hash_indexes." in name for name in {*loaded} ^ {*used}):
        what_to_do += " A table with an index is one that was converted with raw_ids() or dense_rows=0 when saving."
    if places := _places_of(loaded, saved):  # this model may be a part of the one that was saved
        place = places.most_common(1)[0][0]
        place = without_wrappers(place) or place
        what_to_do += f" To export a part of it, pass submodule={place!a} to recfx.export."
    check_names("", loaded, [*used, *extra_state], what_to_do)
    return loaded


def _places_of(names: Collection[str], saved: Collection[str]) -> Counter[str]:
    """The submodules that have names of a model: how many of ``names`` are among ``saved`` behind each path."""
    expected = set(names)
    dots = [(name, place) for name in saved for place, letter in enumerate(name) if letter == "."]
    return Counter(name[:dot] for name, dot in dots if name[dot + 1 :] in expected)


def _prefix_of(submodule: str, names: Collection[str], saved: Collection[str]) -> str:
    """What the names of a submodule with the state ``names`` begin with in a checkpoint; wrappers may be left out."""
    places = _places_of(names, saved)
    alike = [path for path in places if without_wrappers(path) == without_wrappers(submodule)]
    if not alike and not any(name.startswith(f"{submodule}.") for name in saved):
        others = few([ascii(without_wrappers(path) or path) for path, _ in places.most_common(3)], 3)
        raise mismatch(
            f"the checkpoint has no submodule {submodule!a}.",
            module_path=submodule,
            what_to_do=f"pass one that has the parts of this model: {others}." if places else BUILD_AS_SAVED,
        )
    return f"{max(alike, key=places.__getitem__, default=submodule)}."
