"""Processes that have imported torch, TorchRec and recfx when they start: an import takes seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forkserver() -> ForkServerContext:
    """The context to start processes with; ``mp.start_processes(start_method="forkserver")`` uses the same server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchrec.distributed", "fbgemm_gpu", "recfx"])
    return context
