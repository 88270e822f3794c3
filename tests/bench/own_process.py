"""Cases that run in processes of their own: ranks, and others because torch never frees tables that have an optimizer
in backward.
"""

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
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
    if _is_small(setup):
        return list(run(setup, *arguments))
    return on_ranks(0, run, setup, *arguments)


def _is_small(setup: Setup) -> bool:
    return 4 * setup.tables * setup.rows * setup.dim < _SMALL_BYTES


def on_ranks(ranks: int, run: Callable[..., Iterable[Result]], setup: Setup, *arguments: Any) -> list[Result]:
    """The results of the first of so many ranks, which share the threads; 0: of a process without a group."""
    forkserver()
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, folder, run, setup, arguments)
        mp.start_processes(_process, given, nprocs=max(1, ranks), start_method="forkserver")
        return torch.load(os.path.join(folder, "results"), weights_only=False)


def cases_on_ranks(
    ranks: int, run: Callable[..., Iterable[Result]], setup: Setup, cases: Iterable[Any]
) -> Iterator[Result]:
    """``on_ranks`` for ``run(setup, case)`` of each case; if tables are small, all of them on the same ranks."""
    if _is_small(setup):
        yield from on_ranks(ranks, _run_cases, setup, run, list(cases))
    else:
        for case in cases:
            yield from on_ranks(ranks, run, setup, case)


def _run_cases(setup: Setup, run: Callable[..., Iterable[Result]], cases: list[Any]) -> Iterator[Result]:
    for case in cases:
        yield from run(setup, case)


def _process(
    rank: int, ranks: int, folder: str, run: Callable[..., Iterable[Result]], setup: Setup, arguments: tuple[Any, ...]
) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, setup.threads // max(1, ranks)))
    torch.manual_seed(rank)
    if ranks:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    results = list(run(setup, *arguments))
    gc.collect()  # wrappers that outlive their process group may abort the process
    if rank == 0:
        torch.save(results, os.path.join(folder, "results"))
    if ranks:
        dist.barrier()
        dist.destroy_process_group()
