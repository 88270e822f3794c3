"""``recfx.TrainPipeline``: while a batch computes, the ids of the next one travel, on every device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DMPCollection

from recfx.errors import ConversionError, InputError
from recfx.training.ahead import CallsAhead, PipelinedCollection
from recfx.training.background import Streams
from recfx.training.batch_paths import move
from recfx.training.calls_ahead import StartedCall

_MOST_REFUSED = 16  # batches in a row that do not fit; a loader may give no others, and never end


@dataclass
class _Batch:
    """A batch on the device. ``calls``: those that were made ahead, None if none could be."""

    value: Any
    calls: list[StartedCall] | None = None

    @property
    def does_not_fit(self) -> bool:
        """Whether the first of its calls refused it: nothing was sent, and the other calls were not made."""
        return bool(self.calls and isinstance(self.calls[0].error, InputError))


class TrainPipeline:
    """Runs steps of a model with sharded collections; a drop-in for TorchRec's ``TrainPipelineSparseDist``.

    While a batch computes, the ids of the next batch are selected, sent, awaited and, where that changes nothing,
    looked up in the indexes; the batch after that is copied to the device. Results are those of steps that run one by
    one, to the last bit: indexes insert, count and evict in the order of the batches, each in its own step, and a
    lookup comes after the update of the step before.

    The model is called with one batch and returns ``(losses, output)``. A collection that it calls with a part of the
    batch (the batch itself, an attribute, an item, of any depth up to 4) is pipelined; ``report()`` says which are not,
    and why, and so does a warning. Between steps the model is free: run it, save it, switch its mode.

    Every rank runs the same number of steps. An error of a batch (in selecting its ids, a full table) is raised by the
    ``progress`` whose batch it is, which is dropped then; batches after it stay. An error on some ranks only is as
    without a pipeline: ids that do not fit are not sent, and the next batch takes their place among the other ranks';
    after an error in the middle of a step (a full table) this rank sends nothing more (``OutOfStepError``), and the
    others wait in a collective.

    Args:
        model: in training mode, or in eval mode: then nothing is trained.
        optimizer: of what no fused optimizer trains.
        device: where the model computes.

    Raises:
        ConversionError: ``two_dimensional_parallelism``.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
        if isinstance(model, DMPCollection):
            raise ConversionError(
                "a DMPCollection keeps copies of the tables in step between groups, which this pipeline does not do.",
                reason="two_dimensional_parallelism",
                what_to_do="use torchrec's TrainPipelineSparseDist.",
            )
        self._model, self._optimizer = model, optimizer
        self._streams = Streams(torch.device(device))
        self._ahead = CallsAhead(model, self._streams)
        self._batches: deque[_Batch] = deque()
        self._iterator: Iterator[Any] | None = None
        self._ended: Exception | None = None

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Run one step, and return the model's output.

        Two batches more than have run are taken from ``iterator``. Those taken from an earlier one run first.

        Raises:
            StopIteration: ``iterator`` is at its end, and all batches have run.
            ConversionError: ``no_loss_and_output``.
            Exception: of the model, the optimizer, or, once the batches before have run, of ``iterator``.
        """
        if iterator is not self._iterator:
            self._iterator, self._ended = iterator, None
        self._load(1)
        if not self._batches:
            raise self._end()
        current = self._batches[0]
        try:
            self._start(current)
            self._ahead.send(current.calls)
            self._start_next()
            self._load(3)
            output = self._run(current)
        finally:
            self._batches.popleft()
        for batch in self._batches:
            for call in batch.calls or ():
                call.wait()  # whoever changes an index between steps must be alone with it
        return output

    def report(self) -> list[PipelinedCollection]:
        """Each sharded or converted collection: whether it is pipelined, and if not, why."""
        return self._ahead.report()

    def _run(self, current: _Batch) -> Any:
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        self._streams.take(current.value, self._streams.copy)
        with self._ahead.given(current.value, current.calls):
            result = self._model(current.value)
        losses, output = _loss_and_output(result)
        following = self._start_next()
        if following is not None:
            self._ahead.send(following.calls)
        if training:
            torch.sum(losses).backward()
            self._optimizer.step()
        return output

    def _load(self, count: int) -> None:
        """Have ``count`` batches, or all that there are. An error of the iterator waits until they have run."""
        assert self._iterator is not None
        while len(self._batches) < count and self._ended is None:
            try:
                value = next(self._iterator)
                if self._streams.copy is not None:
                    with self._streams.on(self._streams.copy):
                        value = move(value, self._streams.device)
            except Exception as error:
                self._ended = error
            else:
                self._batches.append(_Batch(value))

    def _end(self) -> Exception:
        assert self._ended is not None
        if isinstance(self._ended, StopIteration):
            return StopIteration()
        error, self._ended = self._ended, None  # the next batch may be a good one
        return error

    def _start_next(self) -> _Batch | None:
        """Start the next batch, if it has not been; after the first batch of all this is before its own step.

        A batch that does not fit sends nothing, here or when its error is raised. The other ranks know nothing of it:
        the batch behind takes its place now, or this rank's pooled rows would meet their ids.

        Raises:
            InputError: of the last of too many such batches in a row.
        """
        for position in range(1, _MOST_REFUSED + 2):
            self._load(position + 1)
            if len(self._batches) <= position:
                return None
            batch = self._batches[position]
            self._start(batch)
            if not batch.does_not_fit:
                return batch
        assert batch.calls is not None
        assert batch.calls[0].error is not None
        raise batch.calls[0].error

    def _start(self, batch: _Batch) -> None:
        if batch.calls is None:
            batch.calls = self._ahead.start(batch.value)


def _loss_and_output(result: Any) -> tuple[Any, Any]:
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise ConversionError(
        f"the model returned a {type(result).__name__}, not (losses, output).",
        reason="no_loss_and_output",
        what_to_do="let its forward compute the loss, and return it first; wrap the model if need be.",
    )
