"""What was measured to be best on this machine's devices: ``python -m recfx doctor`` writes it, launches read it.

The file is ``tuned.json`` in the directory in which the C++ library is kept. It holds, by the name that a driver gives
to a device, how many programs of a kernel share a core. That changes no result: a program takes whole bags or ids. Of
kernels whose sums would depend on it, the fused step above all, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from recfx.kernels.build import library
from recfx.kernels.build.private_files import make_private_directory, new_file, refuse_unsafe

VERSION = 1
KERNELS = (
    "recfx_pooled_lookup",
    "recfx_quantized_lookup",
    "recfx_per_sample_weight_gradients",
)
"""Those that something may be kept of."""

MOST_PER_CORE = 64

_logger = logging.getLogger("recfx")
_trying: dict[str, int] = {}


class TunedFileError(ValueError):
    """The file is none of ours, or damaged."""


def path() -> Path:
    """Where the file is, or would be."""
    return library.build_directory() / "tuned.json"


def programs_per_core(device_name: str, kernel: str, default: int) -> int:
    """How many programs of a kernel share a core of a device.

    Args:
        device_name: as its driver calls it.
        kernel: the name of the Triton function.
        default: if nothing was kept.
    """
    return _trying.get(kernel) or _kept().get(device_name, {}).get(kernel, default)


@contextlib.contextmanager
def trying(kernel: str, number: int) -> Iterator[None]:
    """Inside, so many programs of the kernel share a core."""
    _trying[kernel] = number
    try:
        yield
    finally:
        del _trying[kernel]


def keep(device_name: str, choices: Mapping[str, int]) -> Path:
    """Write down what is best on a device, beside what is known of others; launches use it from now on.

    Returns:
        The path of the file.

    Raises:
        OSError: it cannot be written. What was kept before is as it was.
    """
    kept = {**_kept(), device_name: dict(choices)}
    make_private_directory(path().parent)
    with new_file(path()) as file:
        file.path.write_text(json.dumps({"version": VERSION, "programs_per_core": kept}, indent=2) + "\n")
        file.put_in_place()
    _kept.cache_clear()
    return path()


@functools.cache
def _kept() -> dict[str, dict[str, int]]:
    """By device and kernel. A file that cannot be used is as none, with a warning."""
    try:
        refuse_unsafe(path().parent)
        refuse_unsafe(path())
        return parse(path().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _logger.warning(
            "%s is not used: %s. What to do: delete it, and run python -m recfx doctor to measure again.", path(), error
        )
        return {}


def parse(text: str) -> dict[str, dict[str, int]]:
    """What the file says.

    Raises:
        TunedFileError: it is no such file, or holds a number that cannot be.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise TunedFileError(f"it is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise TunedFileError(f"it is not of version {VERSION}")
    devices = content.get("programs_per_core")
    if not isinstance(devices, dict) or not all(isinstance(numbers, dict) for numbers in devices.values()):
        raise TunedFileError("it names no devices")
    for device, choices in devices.items():
        for kernel, number in choices.items():
            if kernel not in KERNELS or type(number) is not int or not 1 <= number <= MOST_PER_CORE:
                raise TunedFileError(f"{kernel!r} of {device!r} cannot be {number!r}")
    return devices
