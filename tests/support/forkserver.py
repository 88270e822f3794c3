"""Processes that have imported torch and TorchRec when they start: an import takes seconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext

_IMPORTED = ["torch", "torchrec.distributed", "fbgemm_gpu", "torch.distributed.optim", "torchrec.inference.modules"]
_OF_RECFX = ["rich.table", "torch._inductor.codegen.common", "torch.export.pt2_archive", "torch.export._trace"]
"""What recfx imports besides, a third of its own import."""


def forkserver() -> ForkServerContext:
    """The context to start processes with; ``mp.start_processes(start_method="forkserver")`` uses the same server.

    It does not import recfx: a process that was forked after that import would have a single thread, and scripts set
    variables that recfx reads when it is imported. The import that is left takes a quarter of a second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *_OF_RECFX, "tests.support.frozen_imports"])
    return context
