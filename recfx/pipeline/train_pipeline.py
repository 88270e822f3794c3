"""``recfx.TrainPipeline``: sends the ids of the next batch while a batch computes, on every kind of device."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.distributed.model_parallel import DMPCollection

from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.ranks_agree import tell_counts
from recfx.collections.wrappers import usable_device
from recfx.errors import ConversionError, type_of
from recfx.errors.argument_types import typed
from recfx.pipeline.background import Streams
from recfx.pipeline.batch_paths import Versions, move
from recfx.pipeline.prefetch import CallsAhead, PipelinedCollection
from recfx.pipeline.prefetched_call import StartedCall, batch_changed
from recfx.runtime import marks
from recfx.runtime.marks import InStep, LostRanks, has_failed

_NAME = "recfx.TrainPipeline.progress"
_AFTER_AN_ERROR = "recfx.TrainPipeline.progress, after a step that failed"
_AFTER_THE_FIRST = "recfx.TrainPipeline.progress, after the first batch"


class Held(NamedTuple):
    """How many batches a rank has loaded, and whether its iterator raised anything other than ``StopIteration``."""

    batches: int
    failed: bool


class Agreement:
    """Tells all ranks of a model's collections what each of them has, in the group of its first sharded collection.

    Its calls are collective, and raise an ``OutOfStepError``, ``ranks_at_different_calls``, if ranks make others.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next(iter(sharded_collections(model).values()), None)
        self._groups = None if first is None or first.groups.ids.size() == 1 else first.groups
        # All of them now: this rank has to name the calls that other ranks are at, too.
        self._marks = {place: marks.identity(place, [], []) for place in (_NAME, _AFTER_AN_ERROR, _AFTER_THE_FIRST)}

    @property
    def is_free(self) -> bool:
        """Whether there is no other rank to ask."""
        return self._groups is None

    def lost_ranks(self) -> AbstractContextManager[None]:
        """Guard a backward: after one in which another rank was lost (``rank_lost``), this rank sends nothing more.

        Otherwise a rank that still waits in that step would get a message of a later one.
        """
        return LostRanks(None if self._groups is None else self._groups.pooled, _NAME)

    def exchange(self, mine: Held, place: str = _NAME) -> list[Held]:
        """What each rank has, in order; only this rank's answer if there are no others.

        After an error, this rank waits here for ranks that are still in the middle of the step: they wait for its
        pooled rows or gradients, and must not get those of a later step. All fail when the group's timeout expires.
        """
        if self._groups is None or has_failed(self._groups.pooled):
            return [mine]
        with InStep(self._groups.pooled, _NAME):
            told = tell_counts(self._groups.ids, mine.batches, int(mine.failed), self._marks[place], _NAME)
        return [Held(count, bool(error)) for count, error in told]

    def is_on_any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank, after the first batch."""
        return any(rank.failed for rank in self.exchange(Held(0, failed=flag), _AFTER_THE_FIRST))


@dataclass
class _Batch:
    """A batch on the device."""

    value: Any
    calls: list[StartedCall] | None = None  # that were started ahead; None if none could be
    is_overwritten: bool = False  # whether the iterator has loaded another batch into its memory


class TrainPipeline:
    """Runs steps of a model with sharded collections; a drop-in for TorchRec's ``TrainPipelineSparseDist``.

    While a batch computes, the ids of the next batch are selected, sent, awaited and, if that does not change the
    results, looked up in the indexes; the batch after that is copied to the device. A collection that is not sharded
    has no ids to send; if its tables are not on the host, the next batch's ids are copied to the host and looked up in
    the same way. Results are bit for bit those of running the steps one by one: indexes insert, count and evict in the
    order of the batches, each in its own step, and a lookup comes after the update of the previous step.

    A batch must not be changed in place once the iterator has returned it (``batch_changed``): neither by a loader that
    fills its memory again, nor by a model before it calls the collections; a collection whose input the model changes
    with the first batch is not pipelined. Writing through ``.numpy()`` or ``.data`` is not noticed.

    The model is called with one batch and returns ``(losses, output)``. A collection that it calls with a part of the
    batch (the batch itself, an attribute or an item, up to a depth of 4) is pipelined; ``report()`` says which are not,
    and why, and so does a warning. Between steps the model may be used freely: run it, save it, switch its mode.

    Every rank runs the same number of steps: if the data of only some ranks ends, all ranks raise the same error. An
    error of a batch (in selecting its ids, or a full table) is raised by the ``progress`` of that batch, which is then
    dropped; later batches stay. A batch that one rank refuses is refused by all; after an error in the middle of a step
    on only some ranks (a full table, or an error of the model or the backward), these send nothing more
    (``OutOfStepError``) or wait for the others before the next step, and all fail when the group's timeout expires. So
    do ranks of which only some call a collection with something other than the part of the batch that was sent ahead.

    Example:
        >>> class Training(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = recfx.convert(Model())
        ...     def forward(self, batch):
        ...         output = self.model(batch)
        ...         return output.square().mean(), output
        >>> model = Training()
        >>> pipeline = recfx.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), "cpu")
        >>> pipeline.progress(iter([batch, batch])).shape
        torch.Size([2, 1])

    Args:
        model: a model in training mode, or in eval mode, in which nothing is trained.
        optimizer: the optimizer of the parameters that no fused optimizer trains.
        device: the device on which the model computes.

    Raises:
        ConversionError: ``invalid_argument``, ``device_unavailable``, ``two_dimensional_parallelism``.
    """

    @typed(ConversionError, left=("optimizer",))
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
        if not all(callable(getattr(optimizer, name, None)) for name in ("zero_grad", "step")):
            raise ConversionError(
                f"optimizer is {type_of(optimizer)}.",
                reason="invalid_argument",
                what_to_do="pass a torch.optim.Optimizer, or what has zero_grad() and step() as well.",
            )
        if isinstance(model, DMPCollection):
            raise ConversionError(
                "a DMPCollection synchronises copies of the tables between groups, which this pipeline does not do.",
                reason="two_dimensional_parallelism",
                what_to_do="use torchrec's TrainPipelineSparseDist.",
            )
        self._model, self._optimizer = model, optimizer
        self._streams = Streams(usable_device(device))
        self._ahead = CallsAhead(model, self._streams)
        self._agreement = Agreement(model)
        self._batches: deque[_Batch] = deque()
        self._shared = 0  # how many of them are known to have a counterpart on every rank
        self._steps = 0  # since the iterator was given
        self._failed = False  # whether the previous step failed while other ranks may have gone on with it
        self._over: Exception | None = None  # how the iterator ended, on all ranks
        self._iterator: Iterator[Any] | None = None
        self._ended: Exception | None = None

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Run one step, and return the model's output.

        The pipeline takes up to two batches from ``iterator`` in advance. Batches of an earlier iterator run first.

        Example:
            >>> class Training(Model):
            ...     def forward(self, batch):
            ...         output = super().forward(batch)
            ...         return output.square().mean(), output
            >>> model = recfx.convert(Training())
            >>> pipeline = recfx.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), "cpu")
            >>> batches = iter([batch, batch])
            >>> pipeline.progress(batches).shape
            torch.Size([2, 1])

        Raises:
            StopIteration: ``iterator`` is exhausted on every rank, and all batches have run.
            OutOfStepError: ``data_ended``: it is exhausted on some ranks, and all batches that every rank has were run;
                the others are dropped. ``data_failed_on_another_rank``: this rank's batch is kept. ``rank_lost``.
            InputError: ``part_not_in_batch``: only some ranks' batches have the part that a collection is called with;
                the others raise ``refused_on_another_rank``. ``batch_changed``.
            ConversionError: ``no_loss_and_output``.
            Exception: any error of the model, the optimizer or, once the batches before it have run, of ``iterator``.
        """
        if iterator is not self._iterator:
            self._iterator, self._ended, self._over, self._steps = iterator, None, None, 0
        if self._over is not None:
            raise self._over.with_traceback(None)
        self._load(3)
        if self._failed:
            self._rejoin()
        if self._shared < 1 or self._agreement.is_free:
            self._share()
        current = self._batches[0]
        try:
            self._start(0)
            self._send(0)
            self._start(1)
            output = self._run(current)
        finally:
            self._batches.popleft()
            self._shared -= 1
            self._steps += 1
        for batch in self._batches:
            for call in batch.calls or ():
                call.wait()  # code that changes an index between steps must have it to itself
        return output

    def report(self) -> list[PipelinedCollection]:
        """Each sharded or converted collection: whether it is pipelined, and if not, why.

        Example:
            >>> model = recfx.convert(Model())
            >>> pipeline = recfx.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), "cpu")
            >>> [(sharded.path, sharded.pipelined) for sharded in pipeline.report()]  # nothing is sharded here
            [('ebc', False)]
        """
        return self._ahead.report()

    def _run(self, current: _Batch) -> Any:
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        self._streams.take(current.value, self._streams.copy)
        try:
            if current.is_overwritten:
                raise batch_changed("the iterator has loaded a later batch into its memory")
            following = self._batches[1].calls if len(self._batches) > 1 else None
            ahead = self._ahead.given(current.value, current.calls, following)
            with ahead:
                result = self._model(current.value)
            if current.calls is None:  # the very first batch, from which calls are learned
                self._ahead.agree(self._agreement.is_on_any_rank)
            losses, output = _loss_and_output(result)
            self._start(1)  # only after the very first batch
            self._send(1)
            if training:
                with self._agreement.lost_ranks():
                    torch.sum(losses).backward()
        except BaseException:
            self._failed = training or not all(call.is_finished for call in current.calls or ())
            raise
        if training:
            self._optimizer.step()
        return output

    def _rejoin(self) -> None:
        """Wait for ranks that went on with the step that failed here."""
        self._start(0)
        self._send(0)
        self._agreement.exchange(Held(0, failed=True), _AFTER_AN_ERROR)
        self._failed = False

    def _load(self, count: int) -> None:
        """Load ``count`` batches, or all that are left. An error of the iterator is raised once they have run."""
        assert self._iterator is not None
        while len(self._batches) < count and self._ended is None:
            before = [(batch, Versions(batch.value)) for batch in self._batches]
            try:
                value = next(self._iterator)
                for batch, versions in before:
                    batch.is_overwritten |= versions.overwritten_by(value)
                if self._streams.copy is not None:
                    with self._streams.on(self._streams.copy):
                        value = move(value, self._streams.device)
            except Exception as error:
                self._ended = error
            else:
                self._batches.append(_Batch(value))

    def _share(self) -> None:
        """Ask all ranks how many batches they have. Raises ``StopIteration`` if no rank has any, the error of the
        iterator, or an ``OutOfStepError`` if it is that of another rank, or if only some ranks have batches.
        """
        error = None if isinstance(self._ended, StopIteration) else self._ended
        ranks = self._agreement.exchange(Held(len(self._batches), error is not None))
        self._shared = min(rank_has.batches for rank_has in ranks)
        if self._shared:
            return
        if error is not None and not self._batches:
            self._ended = None  # the next batch may be fine
            raise error
        without = [rank for rank, rank_has in enumerate(ranks) if not rank_has.batches]
        failed = [rank for rank in without if ranks[rank].failed]
        if failed:
            raise marks.data_failed(failed)
        self._batches.clear()
        if len(without) == len(ranks):
            self._over = StopIteration()
        else:
            self._over = marks.data_ended(without, f" after {self._steps} batches")
            for collection in sharded_collections(self._model).values():
                marks.begin_anew(collection.groups.ids)
        raise self._over

    def _start(self, position: int) -> None:
        """Start the batch at this position, unless it has been started or not every rank has it."""
        if position < min(self._shared, len(self._batches)):
            batch = self._batches[position]
            if batch.calls is None:
                batch.calls = self._ahead.start(batch.value, is_last=len(self._batches) == position + 1)

    def _send(self, position: int) -> None:
        """Send the ids of the batch at this position, if it was started. Its messages say whether all have the next."""
        if position < len(self._batches) and self._ahead.send(self._batches[position].calls):
            self._shared = max(self._shared, position + 2)


def _loss_and_output(result: Any) -> tuple[Any, Any]:
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise ConversionError(
        f"the model returned {type_of(result)}, not (losses, output).",
        reason="no_loss_and_output",
        what_to_do="let its forward compute the loss, and return it first; wrap the model if necessary.",
    )
