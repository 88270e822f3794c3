"""Whether all ranks have a batch: an exchange of its own, for when no message of a batch can tell."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.out_of_step import has_failed, in_step
from recfx.collections.sharding.ranks_agree import tell_counts
from recfx.runtime import marks

_NAME = "recfx.TrainPipeline.progress"
_AFTER_AN_ERROR = "recfx.TrainPipeline.progress, after a step that failed"
_AFTER_THE_FIRST = "recfx.TrainPipeline.progress, after the first batch"


class Held(NamedTuple):
    """What a rank has.

    Args:
        batches: how many batches it has loaded.
        failed: whether its iterator raised anything other than ``StopIteration``.
    """

    batches: int
    failed: bool


class Agreement:
    """Tells all ranks of a model's collections how many batches each of them has.

    Args:
        model: the process group of its first sharded collection is used.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next(iter(sharded_collections(model).values()), None)
        self._groups = None if first is None or first.groups.ids.size() == 1 else first.groups
        self._mark, self._mark_after_error = marks.identity(_NAME, [], []), marks.identity(_AFTER_AN_ERROR, [], [])
        self._mark_after_first = marks.identity(_AFTER_THE_FIRST, [], [])

    @property
    def is_free(self) -> bool:
        """Whether there is no other rank to ask."""
        return self._groups is None

    def reach(self, mine: Held) -> list[Held]:
        """What each rank has, in order; only this rank's answer if there are no others. Collective.

        Raises:
            OutOfStepError: ``ranks_at_different_calls``.
        """
        return self._exchange(mine, self._mark)

    def meet_after_error(self) -> None:
        """Wait for all ranks: the step failed on all of them, or some are still in the middle of it. Collective.

        Those are waiting for this rank's pooled rows or gradients, and must not get those of a later step instead. This
        rank waits for them here, so that all ranks fail when the group's timeout expires.

        Raises:
            OutOfStepError: ``ranks_at_different_calls``.
        """
        self._exchange(Held(0, failed=True), self._mark_after_error)

    def is_on_any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank, after the first batch. Collective.

        Raises:
            OutOfStepError: ``ranks_at_different_calls``.
        """
        return any(held.failed for held in self._exchange(Held(0, failed=flag), self._mark_after_first))

    def _exchange(self, mine: Held, mark: int) -> list[Held]:
        if self._groups is None or has_failed(self._groups.pooled):
            return [mine]
        with in_step(self._groups.pooled, _NAME):
            told = tell_counts(self._groups.ids, mine.batches, int(mine.failed), mark, _NAME)
        return [Held(count, bool(error)) for count, error in told]
