"""What was measured to be best on this machine's devices: ``python -m recfx doctor`` writes it, launches read it.

The file is ``tuned.json`` in the directory in which the C++ library is kept. It holds, by the name that a driver gives
to a device, how many programs of a kernel share a core, how many warps a program has, for how many rows a lookup asks
at a time, and, on NPUs, for which kinds of lookups the vendor's operators are faster than kernels in Triton. That
changes no result: a program takes whole bags or ids, and a bag is summed in the order of its ids.
Of kernels whose sums would depend on such a number, the fused step above all, nothing is kept.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path

import torch

from recfx.kernels.build import library
from recfx.kernels.build.private_files import make_private_directory, new_file, refuse_unsafe
from recfx.kernels.build.tiling import LOOKUP_ROWS

PROGRAMS_PER_CORE, ROWS_IN_FLIGHT, WARPS, VENDOR = "programs_per_core", "rows_in_flight", "warps", "vendor_operators"
_LOOKUPS = ("recfx_pooled_lookup", "recfx_quantized_lookup")
_FLOATS, _WIDTHS = (torch.float32, torch.float16, torch.bfloat16), (16, 64, 256, 1024)


def kind_of_lookup(combine: str, dtype: torch.dtype, dim: int) -> str:
    """What stands for a lookup of tables with up to 1,024 columns where forms are timed, such as ``"SUM float32 64"``.
    ``combine`` is ``"SUM"``, ``"MEAN"`` or ``"NONE"``.
    """
    width = next(width for width in _WIDTHS if dim <= width)
    return f"{combine} {dtype} {width}".replace("torch.", "")


KINDS_OF_LOOKUPS = {kind_of_lookup(*kind): kind for kind in product(("SUM", "MEAN", "NONE"), _FLOATS, _WIDTHS)}
ALLOWED: Mapping[str, Mapping[str, Sequence[int]]] = {
    PROGRAMS_PER_CORE: dict.fromkeys((*_LOOKUPS, "recfx_per_sample_weight_gradients"), range(1, 513)),
    ROWS_IN_FLIGHT: dict.fromkeys(_LOOKUPS, LOOKUP_ROWS),
    WARPS: {f"{kernel}_on_gpu": (1, 2, 4, 8) for kernel in (*_LOOKUPS, "recfx_gather_rows")},
    VENDOR: dict.fromkeys(KINDS_OF_LOOKUPS, (0, 1)),
}
"""What may be kept: by setting, then by kernel or by kind of lookups, the numbers that there are."""

Choices = Mapping[str, Mapping[str, int]]
"""By setting, then by kernel or by kind of lookups."""

_logger = logging.getLogger("recfx")
_trying: dict[tuple[str, str], int] = {}


def path() -> Path:
    """Where the file is, or would be."""
    return library.build_directory() / "tuned.json"


def number(device_name: str, setting: str, kernel: str) -> int | None:
    """What was chosen for a kernel on a device; None if nothing was.

    Args:
        device_name: as its driver calls it.
        setting: ``PROGRAMS_PER_CORE``, ``ROWS_IN_FLIGHT``, ``WARPS`` or ``VENDOR``.
        kernel: the name of the Triton function, or the kind of lookups.
    """
    kept = _kept().get(device_name, {}).get(setting, {})
    return _trying.get((setting, kernel), kept.get(kernel))


@contextlib.contextmanager
def trying(setting: str, kernel: str, number: int) -> Iterator[None]:
    """Inside, the number goes before what was kept."""
    _trying[setting, kernel] = number
    try:
        yield
    finally:
        del _trying[setting, kernel]


def keep(device_name: str, choices: Choices) -> Path:
    """Write down what is best on a device, beside what is known of others; launches use it from now on.

    Returns:
        The path of the file.

    Raises:
        OSError: it cannot be written. What was kept before is as it was.
    """
    _kept.cache_clear()  # another process may have written since
    kept = {**_kept(), device_name: choices}
    make_private_directory(path().parent)
    with new_file(path()) as file:
        file.path.write_text(json.dumps({"version": 2, "devices": kept}, indent=2) + "\n")
        file.put_in_place()
    _kept.cache_clear()
    return path()


@functools.cache
def _kept() -> dict[str, Choices]:
    """By device. A file that cannot be used is as none, with a warning."""
    try:
        refuse_unsafe(path().parent)
        refuse_unsafe(path())
        devices: dict[str, Choices] = json.loads(path().read_text())["devices"]
        for setting, choices in chain.from_iterable(settings.items() for settings in devices.values()):
            for kernel, number in choices.items():
                if type(number) is not int or number not in ALLOWED[setting][kernel]:
                    raise ValueError(f"{setting} of {kernel} cannot be {number!r}")
        return devices
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _logger.warning(
            "%s is not used: %s. What to do: delete it, and run python -m recfx doctor to measure again.", path(), error
        )
        return {}
