"""How ranks stay in step: marks, and what becomes of a rank that fails in the middle of a call.

A mark is what each rank tells all others about a call, in the message that says how many ids follow. Collectives are
matched only by their order, so ranks would not notice if one of them sent the ids of a different call, or had none to
send. The mark says which call this is, in which mode it is made, whether the rank has ids for it, and which backwards
have run since the call before it (see ``Backwards``). All ranks read the same marks, reach the same verdict about the
call, and stay in step.

After ids are sent, a rank that fails is alone: if it started its next batch, its ids would arrive where peers wait for
other messages. So it sends nothing more in that process group, and the peers' collectives fail, at the latest when the
group's timeout expires.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from recfx.errors import InputError, OutOfStepError, RecfxError

REFUSED = 1  # this rank's batch does not fit the collection: it sends no ids
LAST = 2  # this rank has no batch after this one
AHEAD = 8  # the call is made before its step
LACKS = 16  # this rank's batch has no such part as the collection is called with: it sends no ids
TRAINS = 32  # the call is made in training mode
EVALUATES = 64  # it is made in eval mode
NO_GRADIENTS = 128  # it is made where gradients are off, so no backward follows
_RUN_AT, _RUN_BITS = 8, 14
_RUN = (1 << _RUN_BITS) - 1 << _RUN_AT  # the backwards since the call before it; 0 without any, otherwise odd
_BITS = _RUN_AT + _RUN_BITS
_MODE = TRAINS | EVALUATES | NO_GRADIENTS
_OF_RANK = REFUSED | LAST | LACKS | _RUN
_OF_BATCH = LAST | AHEAD  # the same for all calls of a batch


class Backwards:
    """Which backwards of a sharded collection have run: with each call, ranks tell each other of those since the last.

    A rank whose loss leaves a collection out takes no part in its backward. Collectives are matched only by their
    order, so the other ranks wait for it, or exchange their gradients for its gradients of another call.
    Backwards of all collections of a ``group`` are counted in their order.
    """

    def __init__(self, collection: str, group: dist.ProcessGroup | None = None) -> None:
        self.collection, self._group = collection, group
        self._calls, self._run, self._errors = 0, 0, _in_group(group).errors

    def begin_call(self) -> tuple[int, int]:
        """The number of the call that begins, and what its mark says of the backwards since the call before it."""
        errors = _in_group(self._group).errors
        if self._errors != errors:
            self._calls, self._run, self._errors = 0, 0, errors
        self._calls, run, self._run = self._calls + 1, self._run, 0
        return self._calls, run << 1 | bool(run)

    def since_call(self) -> int:
        """What its mark would say of the backwards since the last call, with all bits."""
        return self._run if self._errors == _in_group(self._group).errors else 0

    def forget(self) -> None:
        """Take none since the last call for run: what they have trained is replaced on all ranks."""
        self._run = _in_group(self._group).backwards = 0

    def run(self, call: int) -> None:
        """Note that ranks exchange the gradients of a call."""
        group = _in_group(self._group)
        group.backwards += 1
        # A sum tells which calls it is of, and in which order. (Python's own hash of two numbers nearly adds them.)
        digest = hashlib.sha256(b"%d %d" % (call, group.backwards)).digest()
        self._run += 1 + int.from_bytes(digest[:3], "big")


@dataclass
class _InGroup:
    """How often ranks of a group have learned that they were not in step, and the backwards in it since."""

    errors: int = 0
    backwards: int = 0


_groups: WeakKeyDictionary[Any, _InGroup] = WeakKeyDictionary()


def _in_group(group: dist.ProcessGroup | None) -> _InGroup:
    return _groups.setdefault(_InGroup if group is None else group, _InGroup())


def begin_anew(group: dist.ProcessGroup | None) -> None:
    """Take no call or backward in ``group`` for made: its ranks have learned that they were not in step."""
    in_group = _in_group(group)
    in_group.errors, in_group.backwards = in_group.errors + 1, 0


_names: dict[int, str] = {}  # names of collections by their part of the mark, for messages
_orders: dict[int, str] = {}  # the place of each, likewise


def identity(collection: str, keys: list[str], splits: list[int], setting: str = "", order: int = 0) -> int:
    """The part of a mark that identifies the calling collection: the same number on all ranks. ``setting``, in words,
    must be the same on all ranks; ``order`` is the place of the collection among all that were sharded in its process
    group; see ``input_dist_start`` for the rest.
    """
    text = repr((collection, keys, splits, setting, order))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big") << _BITS
    name = repr(collection) if collection else f"the collection of feature {keys[0]!r}"
    _names[number] = f"{name} with {setting}" if setting else name
    _orders[number] = f"number {order} of the collections sharded in this process group"
    return number


def says(training: bool, backwards: int = 0) -> int:
    """The bits for the mode in which a call is made now, and for the backwards since the call before. Only ranks in the
    same mode join the same backward. ``backwards`` is what ``Backwards.begin_call`` returns.
    """
    mode = (TRAINS if training else EVALUATES) | (0 if torch.is_grad_enabled() else NO_GRADIENTS)
    return mode | backwards << _RUN_AT & _RUN


def joint(marks: Sequence[int]) -> int:
    """The mark of calls that are made together; what ranks say of one of them alone comes with the ids."""
    modes = {mark & _MODE for mark in marks}
    mode = modes.pop() if len(modes) == 1 else 0  # otherwise, the number stands for the modes of all
    calls = [(mark & ~_OF_RANK & ~AHEAD) - mode for mark in marks]
    number = identity("", ["together"], calls)
    _names[number] = f"{', '.join(_name(call) for call in calls)} together"
    _orders[number] = _orders[marks[0] >> _BITS << _BITS]
    return number | mode | marks[0] & _OF_BATCH


def any_of(marks: Iterable[int], bit: int) -> bool:
    """Whether any rank has set ``bit``."""
    return any(mark & bit for mark in marks)


def other_calls(marks: list[int], collection: str, group: dist.ProcessGroup | None = None) -> OutOfStepError | None:
    """The error if ranks of ``group`` make different calls, or have run different backwards: the same on all of them.
    They then begin anew.
    """
    if len({mark & ~(REFUSED | LAST | LACKS) for mark in marks}) == 1:
        return None
    error = _different_calls(marks, collection) or different_backwards(
        [mark & _RUN for mark in marks], f"the last call of {_name(marks[0] & ~_MODE)}", collection
    )
    if error is not None:
        begin_anew(group)
    return error


def _different_calls(marks: list[int], collection: str) -> OutOfStepError | None:
    modes = {mark & _MODE for mark in marks}
    calls = {mark & ~(_OF_RANK | _MODE) for mark in marks}
    if len(calls) == 1 and len(modes) <= 1:
        return None
    shown = ~0 if len(modes) > 1 else ~_MODE
    of_several_models = len({_words(call) for call in calls}) < len(calls)
    where = "; ".join(f"rank {rank} {_words(mark & shown, of_several_models)}" for rank, mark in enumerate(marks))
    error = OutOfStepError(
        f"ranks are at different calls: {where}. No ids were sent, and all ranks raise this.",
        reason="ranks_at_different_calls",
        module_path=collection,
        what_to_do="every rank must call the same collections of the same models in the same order, with the same "
        "batches_in_flight, in the same mode (evaluate on all ranks, or evaluate what unconvert or export returns); a "
        "rank that leaves out a part of a step (for an error that it catches, say) must leave it out on all ranks. "
        "save_checkpoint, load_checkpoint, export and unconvert are called on all ranks, too.",
    )
    error.by_all_ranks = len(calls) == 1
    return error


def different_backwards(runs: list[int], since: str, collection: str) -> OutOfStepError | None:
    """The error if ranks have run different backwards: ``runs`` has a number of each rank for them."""
    if len(set(runs)) <= 1:
        return None
    without = [rank for rank, run in enumerate(runs) if not run]
    differently = "losses use its outputs differently, or in another order"
    where = f"the loss of {_ranks(without)} leaves it out" if without else differently
    return OutOfStepError(
        f"ranks have run different backwards since {since}: {where}. Its gradients "
        "may have been exchanged for those of another collection, and have trained wrong rows.",
        reason="backward_on_some_ranks",
        module_path=collection,
        what_to_do="add 0 * output.sum() to the loss on every rank (for a KeyedTensor, of its values()), so that all "
        "run the same backwards; then load the last checkpoint on all ranks, and repeat the steps since.",
    )


def verdict(marks: list[int], collection: str, group: dist.ProcessGroup | None = None) -> RecfxError | None:
    """The error that all ranks raise for a call with these marks; a rank that refuses has its own error."""
    if len(set(marks)) == 1 and not marks[0] & REFUSED:
        return None
    different = other_calls(marks, collection, group)
    if different is not None:
        return different
    refused = [rank for rank, mark in enumerate(marks) if mark & REFUSED]
    if refused:
        return InputError(
            f"{_ranks(refused)} refused this step's batch, for the reason raised there; this rank's "
            "part of it was not looked up either.",
            reason="refused_on_another_rank",
            module_path=collection,
            what_to_do="look for the InputError in the output of that rank. Ranks are still in step: all may go on "
            "with the next batch.",
        )
    return None


def data_ended(ranks: list[int], after: str) -> OutOfStepError:
    """The error if some ranks have a batch and others do not."""
    return OutOfStepError(
        f"the data of {_ranks(ranks)} ended{after}, while other ranks still have batches. All batches that every rank "
        "has were trained.",
        reason="data_ended",
        what_to_do="give every rank the same number of batches (torch's DistributedSampler with drop_last=True, say); "
        "make a new iterator on every rank to go on.",
    )


def data_failed(ranks: list[int]) -> OutOfStepError:
    """The error if the data iterators of other ranks raised an exception."""
    return OutOfStepError(
        f"the iterator of {_ranks(ranks)} failed. This rank's batch was not run, and is kept.",
        reason="data_failed_on_another_rank",
        what_to_do="look for the error in the output of that rank. Ranks are still in step, and go on if all of them "
        "call progress again.",
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _words(mark: int, with_order: bool = False) -> str:
    call = mark >> _BITS << _BITS
    if call not in _names:
        return "is at a call that this rank does not know"
    order = f" ({_orders[call]})" if with_order else ""
    return f"calls {_name(mark, order)}{' ahead of its step' if mark & AHEAD else ''}"


def _name(mark: int, order: str = "") -> str:
    mode = " in training mode" if mark & TRAINS else " in eval mode" if mark & EVALUATES else ""
    return f"{_names[mark >> _BITS << _BITS]}{order}{mode}{' without gradients' if mark & NO_GRADIENTS else ''}"


RANK_LOST = "rank_lost"
_LOST = re.compile(r"\bgloo/|Connection (closed|reset) by peer|caused pair closure|\bHCCL\b", re.IGNORECASE)
_failed: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # what failed


def _is_of_group(error: BaseException) -> bool:
    """Whether a process group raised it because of another rank; gloo and hccl raise a ``RuntimeError``."""
    if not isinstance(error, RuntimeError) or isinstance(error, RecfxError):
        return False
    return isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None


class LostRanks:
    """A context in which what a process group raises if another rank has ended, or does not answer, is ``rank_lost``.

    After that, this rank sends nothing more in ``group``; None leaves that to a context around this one. It can be
    entered again, also from within. ``in_backward``: while gradients of ``collection`` travel.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, collection: str = "", in_backward: bool = False) -> None:
        self.group, self.collection, self._in_backward = group, collection, in_backward

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, OutOfStepError) and error.reason == RANK_LOST:
            self.give_up(error)
        elif _is_of_group(error):
            lost = self._lost(error)
            self.give_up(lost)
            raise lost from error

    def give_up(self, error: BaseException) -> None:
        if self.group is not None:
            give_up(self.group, self.collection, error)

    def _lost(self, error: BaseException) -> OutOfStepError:
        in_backward = self._in_backward
        return OutOfStepError(
            f"{'in the backward of the collection, ' if in_backward else ''}another rank has ended, or has not "
            f"answered in time ({str(error).strip().splitlines()[0]}).",
            reason=RANK_LOST,
            module_path=self.collection,
            what_to_do="see that rank's own error. If it has none, or one of the process group (a timeout, a wrong "
            f"size), the loss may leave {'this or another' if in_backward else 'a'} collection out on some ranks: "
            "add 0 * output.sum() to it on every rank; or its data ended early: give every rank the same number of "
            "batches. Start all ranks again from the last checkpoint.",
        )


class InStep(LostRanks):
    """A context around a step in which the other ranks of ``group`` take part. After any error in it, this rank sends
    nothing more, except for errors that leave all ranks in step: ``OutOfStepError``s, those that all ranks raise, and
    what ``torch.utils.checkpoint`` raises when it has all that the backward needs of a call that it repeats, after the
    same operator on each rank.
    """

    def _failed(self, error: BaseException) -> None:
        super()._failed(error)
        if isinstance(error, (OutOfStepError, _StopRecomputationError)):
            return
        if not (isinstance(error, RecfxError) and error.by_all_ranks):
            self.give_up(error)

    def refuse_if_failed(self) -> None:
        failed = None if self.group is None else _failed.get(self.group)
        if failed is not None:
            raise OutOfStepError(
                f"an earlier step failed on this rank after other ranks had begun it, too ({failed}).",
                reason="out_of_step",
                module_path=self.collection,
                what_to_do="end this process, or destroy the process group on every rank; start again from the last "
                "checkpoint.",
            )


def has_failed(group: dist.ProcessGroup) -> bool:
    """Whether this rank sends nothing more in ``group``."""
    return group in _failed


def give_up(group: dist.ProcessGroup, collection: str, error: BaseException) -> None:
    """Send nothing more in ``group`` from this rank."""
    if group.size() > 1:  # with one rank, nothing waits
        _failed.setdefault(group, f"{collection or 'the root'}: {type(error).__name__}: {error}")
