"""Cases that run in a process of their own, because torch never frees tables that have an optimizer in backward."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.bench.harness import Result
from tests.bench.setup import Setup
from tests.support.forkserver import forkserver

_SMALL_BYTES = 2**28


def in_own_process(run: Callable[..., Iterable[Result]], setup: Setup, *arguments: Any) -> list[Result]:
    """``run(setup, *arguments)``; small tables need no process of their own.

    Args:
        run: a function of a module.
        setup: of the case.
        arguments: anything that can be pickled.
    """
    if 4 * setup.tables * setup.rows * setup.dim < _SMALL_BYTES:
        return list(run(setup, *arguments))
    return in_fresh_process(run, setup, *arguments)


def in_fresh_process(run: Callable[..., Iterable[Result]], setup: Setup, *arguments: Any) -> list[Result]:
    """The same, whatever the size."""
    forkserver()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_process, (folder, run, setup, arguments), nprocs=1, start_method="forkserver")
        found: list[Result] = torch.load(os.path.join(folder, "results"), weights_only=False)
        return found


def _process(
    _: int, folder: str, run: Callable[..., Iterable[Result]], setup: Setup, arguments: tuple[Any, ...]
) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(setup.threads)
    torch.manual_seed(0)
    torch.save(list(run(setup, *arguments)), os.path.join(folder, "results"))
