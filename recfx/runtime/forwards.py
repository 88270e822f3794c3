"""A forward that is refused leaves no trace: what its collections have inserted so far is undone.

The collections of a model are called one after the other, and the input of a later one may depend on the output of an
earlier one. So when a later one refuses its part of a batch, an earlier one has given rows to its ids, and counted
them. The collections of a model share one ``Forwards``, which knows what the forward that is under way has changed.

Nothing tells where a forward of a user's model begins, unless recfx runs it (a whole graph, ``recfx.TrainPipeline``).
Otherwise it follows from the calls: a collection is called more often than a forward calls it, or a backward has run
since. How often that is, the sample of the conversion shows, or else the calls between two backwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from recfx.errors import InputError, OutOfStepError, RecfxError
from recfx.hashing import HashIndex
from recfx.runtime.training_checks import is_replay

_Result = TypeVar("_Result")


class Forward:
    """One forward, as far as it has come.

    Its changes were taken back (``is_undone``), or a backward has run through one of its lookups (``is_trained``), so
    that they stay. ``calls`` counts by ``id``, because parts that are converted one by one have the same names.
    """

    def __init__(self) -> None:
        self.is_undone = self.is_trained = False
        self.calls: dict[int, int] = {}
        self._changes: list[Callable[[], None]] = []

    def changed(self, undo: Callable[[], None]) -> None:
        """Note a change, and what takes it back."""
        self._changes.append(undo)

    def keep(self) -> None:
        self._changes.clear()

    def train(self) -> None:
        self.is_trained = True
        self.keep()

    def undo(self) -> None:
        """Take all changes back, the last one first."""
        self.is_undone = bool(self._changes)
        while self._changes:
            self._changes.pop()()

    def takes(self, collection: int, calls: int) -> bool:
        """Count a call of a collection that a forward calls ``calls`` times; False if it is one of the next forward."""
        made = self.calls.get(collection, 0)
        if self.is_trained or made >= calls:
            return False
        self.calls[collection] = made + 1
        return True


class _Here(threading.local):
    """What one thread does."""

    def __init__(self) -> None:
        self.now = Forward()
        self.since_backward: dict[int, int] = {}  # calls of collections, without those that were undone
        self.depth = 0  # of calls that undo what they refuse
        self.inside: int | None = None  # the collection that is being called
        self.is_declared = False  # whether somebody says where forwards begin


class Forwards:
    """The forwards of collections that are called together. Copies of a model share one of their own.

    ``has_several``: a forward calls several collections, or one of them several times.
    """

    def __init__(self, has_several: bool = False) -> None:
        self.has_several = has_several
        self._must_learn = False  # whether there is a collection of which no sample has shown it
        self._learned: dict[int, int] = {}  # how often a forward calls each collection, where no sample has shown it
        self._here = _Here()

    def __reduce__(self) -> Any:
        return Forwards, (self.has_several,)

    def now(self) -> Forward | None:
        """The forward under way, in which changes are to be noted; None if nobody would undo them."""
        here = self._here
        return here.now if here.depth else None

    def refuse(self, error: Exception) -> None:
        """Undo the forward under way, for this error; the next call begins another.

        Ranks that are out of step may have left this forward in other ways, without undoing it. What all of them have
        done in it stays, so that it is the same on all.
        """
        here = self._here
        refused, here.now = here.now, Forward()
        here.since_backward = dict(Counter(here.since_backward) - Counter(refused.calls))
        if isinstance(error, OutOfStepError):
            refused.keep()
        else:
            refused.undo()

    def call(
        self, collection: object, calls: int, run: Callable[..., _Result], *arguments: Any, **keywords: Any
    ) -> _Result:
        """Call a collection, and undo the forward if it fails. Not a context manager: every small batch comes here.

        ``calls`` is how often a forward calls it; 0 if that is not known.
        """
        here, called = self._here, id(collection)
        around = here.inside
        replayed = is_replay()  # a part of a backward, which undoes nothing
        if not (replayed or here.is_declared or around == called):
            self._count(here, called, calls)
        here.depth += 1
        here.inside = called
        try:
            return run(*arguments, **keywords)
        except Exception as error:
            if not replayed:
                self.refuse(error)
            raise
        finally:
            here.depth -= 1
            here.inside = around

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A context around a whole forward, which is undone if it is refused anywhere."""
        here = self._here
        if here.is_declared:
            yield
            return
        self._begin()
        here.is_declared = True
        here.depth += 1
        try:
            yield
        except RecfxError as error:
            self.refuse(error)
            raise
        finally:
            here.depth -= 1
            here.is_declared = False

    def _count(self, here: _Here, collection: int, calls: int) -> None:
        if not calls:
            self._must_learn = True
        if here.now.is_trained:
            if self._must_learn:
                self._learn(here.since_backward)
            here.since_backward = {}
        calls = calls or self._learned.get(collection, 1)
        if not here.now.takes(collection, calls):
            self._begin()
            here.now.takes(collection, calls)
        here.since_backward[collection] = here.since_backward.get(collection, 0) + 1

    def _learn(self, calls: dict[int, int]) -> None:
        """Learn from the calls between two backwards. The collection with the fewest is called once a forward."""
        forwards = min(calls.values(), default=1)
        self._learned |= {name: count // forwards for name, count in calls.items()}

    def _begin(self) -> None:
        self._here.now.keep()
        self._here.now = Forward()


def guard_backward(
    outputs: Iterable[torch.Tensor], indexes: list[HashIndex], collection: str, forward: Forward | None = None
) -> None:
    """Make the backward of a lookup's ``outputs`` raise if one of its ``indexes`` has removed ids by then.

    The backward raises an ``InputError``, ``backward_after_removal`` or ``backward_after_refusal``, before anything is
    updated. ``forward`` is the forward of the lookup, if it may be undone; after this backward, it no longer may.
    """
    nodes = nodes_of(outputs)
    if not nodes or not indexes:
        return
    before = [index.removals for index in indexes]

    def check(*gradients: Any) -> None:
        if forward is not None and forward.is_undone:
            raise InputError(
                f"the backward of a forward of table {indexes[0].name!r}, which was undone: a later collection of the "
                "model refused its part of the batch, so the new ids of this part have lost their rows again.",
                reason="backward_after_refusal",
                module_path=collection,
                what_to_do="leave out the whole batch when a collection refuses it, or check batches before the model.",
            )
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
        if forward is not None:
            forward.train()

    for node in nodes:
        node.register_prehook(check)


def nodes_of(outputs: Iterable[torch.Tensor]) -> list[Any]:
    """Autograd's nodes of a lookup's outputs, which may share one. Empty without gradients."""
    return list(dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None))
