"""Real processes, with gloo by default, that stay for all tests: starting one takes seconds, a call milliseconds."""

import atexit
import functools
import gc
import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recfx.runtime import marks
from tests.support.forkserver import forkserver
from tests.support.room import with_room

_LONGEST_CALL = 120.0  # seconds
_AFTER_A_FAILURE = 5.0
_AFTER_KILL = 60.0


class RankFailed(AssertionError):
    """A rank raised; carries its traceback."""


class Skipped(str):
    """Why a rank skipped the test."""


class Ranks:
    """``world_size`` processes in one group.

    Args:
        world_size: how many.
        backend: of the group.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size, self.backend = world_size, backend
        context = forkserver()
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        pipes = [context.Pipe() for _ in range(world_size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, world_size, backend, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, world_size, *arguments)`` on every rank; what each gives back.

        Raises:
            RankFailed: with the tracebacks of all ranks that raised.
        """
        try:
            return self._run(function, arguments)
        except BaseException:  # ranks may wait for each other, or have an answer that nobody will ask for
            _running.pop((self.world_size, self.backend), None)
            self.stop()
            raise

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers: dict[int, Any] = {}
        failures: list[str] = []
        skipped: list[str] = []
        deadline = time.monotonic() + _LONGEST_CALL
        while len(answers) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            for pipe in connection.wait(waiting, max(0.0, deadline - time.monotonic())) or waiting[:1]:
                rank = self._pipes.index(pipe)
                if not pipe.poll():
                    failures.append(f"rank {rank} does not answer")
                    answers.update(dict.fromkeys(range(self.world_size)))
                    break
                try:
                    failed, answers[rank] = pipe.recv()
                except EOFError:
                    failed, answers[rank] = True, "it has ended"
                if isinstance(answers[rank], Skipped):
                    skipped.append(str(answers[rank]))
                elif failed:
                    failures.append(f"rank {rank}:\n{answers[rank]}")
                    deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
        if failures:
            raise RankFailed("\n".join(failures))
        if skipped:
            pytest.skip(skipped[0])
        return [answers[rank] for rank in range(self.world_size)]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            if process.is_alive():  # otherwise, its number may be that of another process by now
                process.kill()
        for process in self._processes:
            process.join(_AFTER_KILL)
        self._directory.cleanup()
        if any(process.is_alive() for process in self._processes):
            raise RuntimeError(f"ranks are still there {_AFTER_KILL:.0f} seconds after they were killed")


_running: dict[tuple[int, str], Ranks] = {}


def ranks(world_size: int, backend: str = "gloo") -> Ranks:
    """The processes of this size and backend, started when first asked for."""
    asked = (world_size, backend)
    if asked in _running and not _running[asked].alive:
        stop(*asked)
    if asked not in _running:
        _running[asked] = Ranks(*asked)
    return _running[asked]


def on_ranks(world_size: int, backend: str = "gloo") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs on every rank, as ``test(rank, world_size, ...)``; the other arguments are pytest's."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        _, _, *given = signature.parameters.values()

        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            ranks(world_size, backend).run(function, *(arguments[parameter.name] for parameter in given))

        test.__signature__ = signature.replace(parameters=given)
        function.__qualname__ = f"{function.__qualname__}.__wrapped__"  # where ranks find it
        return test

    return decorate


def stop(world_size: int, backend: str = "gloo") -> None:
    _running.pop((world_size, backend)).stop()


def _stop_all() -> None:
    for asked in list(_running):
        stop(*asked)


atexit.register(_stop_all)


def _serve(rank: int, world_size: int, backend: str, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    module = ""
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        if function.__module__ != module:  # what imports and earlier files have left stays
            module = function.__module__
            gc.collect()
            gc.freeze()
        marks._failed.clear()  # of an error that an earlier test wanted, on all ranks alike
        try:
            pipe.send((False, with_room(function, rank, world_size, *arguments)))
        except pytest.skip.Exception as skipped:
            pipe.send((True, Skipped(skipped)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
