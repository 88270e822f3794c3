"""A wrong ``RECFX_CPU_CAPABILITY`` is refused as soon as the C++ operators are loaded: they know no reason codes."""

from __future__ import annotations

import os

import torch

from recfx.errors import RecfxError, short
from recfx.kernels.build import library

CPU_CAPABILITY = "RECFX_CPU_CAPABILITY"
"""The environment variable that names the vector instructions to use."""


def check_capability() -> None:
    """Refuse vector instructions that are not here. Without a library, nothing uses any.

    Raises:
        RecfxError: ``unknown_cpu_capability``.
    """
    named = os.environ.get(CPU_CAPABILITY)
    if library.loaded_path() is None or not named or named in (here := torch.ops.recfx.cpu_capabilities()):
        return
    raise RecfxError(
        f"the environment variable {CPU_CAPABILITY} is {short(named)}, which kernels on this machine cannot use.",
        reason="unknown_cpu_capability",
        what_to_do=f"unset it, or choose one of {', '.join(here)}.",
    )


library.once_defined(check_capability)
