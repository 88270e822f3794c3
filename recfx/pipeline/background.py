"""Where a pipeline's work runs: the streams of an accelerator, and one thread beside the main one."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch

from recfx.pipeline.batch_paths import tensors_in
from recfx.runtime.transfers import record_stream

Job = tuple[Callable[[], Any], "Future[Any]"]


class Streams:
    """A stream for copies and one for ids, on any device type that has streams; no streams on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        with nullcontext() if self._module is None else self._module.device(device):
            self.copy: Any = None if self._module is None else self._module.Stream()
            self.ids: Any = None if self._module is None else self._module.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run the body of the ``with`` statement on ``stream``."""
        if stream is None:
            return nullcontext()
        return self._module.stream(stream)

    def take(self, values: Any, stream: Any) -> None:
        """Let the current stream use ``values``, which ``stream`` makes."""
        if stream is None:
            return
        current = self._module.current_stream(self.device)
        current.wait_stream(stream)
        for value in tensors_in(values):
            record_stream(value, current)

    def use_device(self) -> None:
        """Make the device the current device of this thread."""
        if self._module is not None and self.device.index is not None:
            self._module.set_device(self.device)


class Worker:
    """One thread that runs jobs in order. It ends with this object, and never keeps the process from ending."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] | None = None

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        """Call ``function`` on the thread; the future's ``result`` raises its errors."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="recfx-pipeline", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        future: Future[Any] = Future()
        self._jobs.put((function, future))
        return future


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        function, future = job
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del job, function, future  # so that no batch is kept alive while waiting for the next job
