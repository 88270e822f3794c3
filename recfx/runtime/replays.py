"""Replays: forwards that activation checkpointing runs again, inside the backward. They get their first answers again.

Ids may have been admitted or evicted since the first run, so their rows cannot be found in the index. Instead, a
forward inside ``torch.utils.checkpoint`` leaves its answers with that checkpoint. They live as long as the checkpoint's
saved tensors; with ``use_reentrant=True``, as long as its node of the graph. Other forwards leave nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint

from recfx.errors import InputError
from recfx.ir.tables import TableSpec
from recfx.versions.differences import top_saved_tensors_hooks

REASONS = ("replayed_ids_evicted", "replayed_ids_absent", "replayed_rows_renewed", "replayed_rows_unknown")
"""The reasons, in the order in which ranks tell each other."""


def replayed_elsewhere(collection: str, reason: str) -> InputError:
    """The error if another rank of a sharded collection cannot run it again, for one of ``REASONS``."""
    return InputError(
        "activation checkpointing runs a forward again, which another rank cannot do: rows of its tables have changed "
        "since.",
        reason=reason,
        module_path=collection,
        what_to_do="see that rank's own error; no rank has trained this batch.",
    )


def replayed_ids_lost(collection: str, table: TableSpec) -> InputError:
    """The error if ids of the first run have no row any more."""
    if table.evicts:
        return InputError(
            f"activation checkpointing runs a forward again, but ids of table {table.name!r} have lost their "
            "rows to later batches meanwhile.",
            reason="replayed_ids_evicted",
            module_path=collection,
            what_to_do="run a batch's backward before the next batch's forward; or use torch.utils.checkpoint with "
            "use_reentrant=False, which keeps rows for as many later forwards as batches_in_flight of the collection "
            "says; or leave the collection out of it.",
        )
    return InputError(
        f"a forward inside a backward has ids of table {table.name!r} that have no row.",
        reason="replayed_ids_absent",
        module_path=collection,
        what_to_do="such a forward is taken for activation checkpointing, which has no new ids. Run "
        "forwards of new batches outside of backwards; erase no ids between a forward and its backward.",
    )


def replayed_rows_renewed(collection: str, table: TableSpec) -> InputError:
    """The error if rows of the first run hold other weights now."""
    return InputError(
        "activation checkpointing runs a forward again, but ids that are not admitted shared rows of table "
        f"{table.name!r} which later batches have given to other ids, with new weights.",
        reason="replayed_rows_renewed",
        module_path=collection,
        what_to_do="run a batch's backward before the next batch's forward; or use HashConfig(unseen='zeros'); or "
        "leave the collection out of activation checkpointing.",
    )


def replayed_rows_unknown(collection: str, table: TableSpec) -> InputError:
    """The error if nobody kept what the first run answered."""
    return InputError(
        "a forward runs inside a backward, as with activation checkpointing, but it is not known which ids of "
        f"table {table.name!r} were admitted when it first ran.",
        reason="replayed_rows_unknown",
        module_path=collection,
        what_to_do="checkpoint with torch.utils.checkpoint, and a function that calls the collection with the same "
        "ids each time; or leave the collection out of it. Run forwards of new batches outside of backwards.",
    )


_NO_BACKWARD = -1  # torch's number of the running backward, when there is none


def is_replay() -> bool:
    """Whether activation checkpointing runs this forward again, inside the backward. Its sightings are not new ones."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


class Answers(NamedTuple):
    """What one forward answered: int64 ``[n]`` ids, and their rows as ``find_or_insert`` returned them.

    ``owners`` are the ids that these rows belonged to; -1 if they belonged to none.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    owners: torch.Tensor


class _Calls:
    """The answers of the forwards inside one checkpoint, in order; replays ask for them in the same order."""

    def __init__(self) -> None:
        self.answers: list[Answers] = []
        self._given, self._backward = 0, _NO_BACKWARD

    def again(self, ids: torch.Tensor) -> Answers | None:
        """The answers of the next forward that is run again; None if that one had other ids."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # each backward runs the checkpoint once, from its beginning
            self._given, self._backward = 0, backward
        position, self._given = self._given, self._given + 1
        if position < len(self.answers) and torch.equal(self.answers[position].ids, ids):
            return self.answers[position]
        return None


class Replays:
    """The answers of one collection's forwards inside checkpoints. Copies have none: graphs belong to the original."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return Replays, ()

    def __len__(self) -> int:
        """The number of forwards whose answers are still known."""
        return len({id(answers) for calls in list(self._calls.values()) for answers in calls.answers})

    def remember(self, ids: torch.Tensor, rows: torch.Tensor, owners: Callable[[], torch.Tensor]) -> None:
        """Leave the answers of a forward, which is not a replay, with the checkpoints around it, if any.

        ``owners`` is not called outside checkpoints.
        """
        if torch.is_grad_enabled() and top_saved_tensors_hooks is not None and top_saved_tensors_hooks(True) is None:
            return
        checkpoints = _surroundings().checkpoints
        if checkpoints:
            self._leave(Answers(ids, rows, owners()), checkpoints)

    def answers(self, ids: torch.Tensor) -> Answers | None:
        """What the first run of this forward answered; None if it is not known.

        If the checkpoint that runs again is not known, any forward of these ids gives the answers, provided that all
        such forwards had the same ones.
        """
        around = _surroundings()
        calls = self._calls.get(around.replayed) if around.replayed is not None else None
        answers = self._only_one(ids) if calls is None else calls.again(ids)
        if answers is not None:
            self._leave(answers, around.checkpoints)
        return answers

    def _leave(self, answers: Answers, checkpoints: list[object]) -> None:
        for enclosing in checkpoints:
            self._calls.setdefault(enclosing, _Calls()).answers.append(answers)

    def _only_one(self, ids: torch.Tensor) -> Answers | None:
        kept = [answers for calls in list(self._calls.values()) for answers in calls.answers]
        same = [answers for answers in kept if torch.equal(answers.ids, ids)]
        return same[0] if same and all(torch.equal(answers.rows, same[0].rows) for answers in same) else None


class _Surroundings(NamedTuple):
    """The checkpoints around a forward.

    Those that run for the first time are objects that live as long as their part of the graph; one may run again.
    """

    checkpoints: list[object]
    replayed: object


def _surroundings() -> _Surroundings:
    """Look through the stack: torch does not tell which checkpoint runs, and several may be nested."""
    checkpoints: list[object] = []
    hooked = _frame_of_hooks()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(checkpoint):
            if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
                checkpoints.append(_first_argument(frame))
            elif frame.f_code is checkpoint.CheckpointFunction.backward.__code__:
                return _Surroundings(checkpoints, _first_argument(frame))
            for value in list(frame.f_locals.values()):
                if isinstance(value, checkpoint._CheckpointFrame):  # in a hook that unpacks its tensors
                    return _Surroundings(checkpoints, value)
                if isinstance(value, GeneratorType) and value.gi_frame is not None:  # suspended around its function
                    suspended = value.gi_frame.f_locals.values()
                    checkpoints += [local for local in suspended if isinstance(local, checkpoint._CheckpointFrame)]
        frame = frame.f_back
    if hooked is not None and all(enclosing is not hooked for enclosing in checkpoints):
        checkpoints.append(hooked)
    return _Surroundings(checkpoints, None)


def _first_argument(frame: FrameType) -> object:
    return frame.f_locals[frame.f_code.co_varnames[0]]


def _frame_of_hooks() -> object:
    """The checkpoint whose hooks save tensors now, if it runs for the first time: it may have no function on the stack
    (``torch.distributed._composable.checkpoint``).
    """
    hooks = None if top_saved_tensors_hooks is None else top_saved_tensors_hooks(True)
    cells = () if hooks is None else getattr(hooks[0], "__closure__", None) or ()
    for cell in cells:
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(content, checkpoint._CheckpointFrame):
            return content
    return None
