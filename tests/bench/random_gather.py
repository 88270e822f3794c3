"""What this machine can do at random: prefetched gathers of slots and of rows, and additions to scores, in C++."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from tests.bench.harness import CannotRun


def gather_slots(groups: torch.Tensor, places: torch.Tensor, out: torch.Tensor, threads: int) -> None:
    """Read one number of a random slot for each id.

    Args:
        groups: int64, any shape, contiguous: pairs of int64 are slots.
        places: int64 ``[n]``, numbers of slots.
        out: int64 ``[n]``.
        threads: of OpenMP.
    """
    _library().gather_first(
        _address(groups), ctypes.c_int64(2), _address(places), _address(out), ctypes.c_int64(places.numel()), threads
    )


def add_one(scores: torch.Tensor, rows: torch.Tensor, before: torch.Tensor, threads: int) -> None:
    """Add 1 to the score of a random row for each id, and keep what it was.

    Args:
        scores: int64 ``[rows]``.
        rows: int64 ``[n]``.
        before: int64 ``[n]``.
        threads: of OpenMP; they may lose additions to each other.
    """
    _library().add_one(_address(scores), _address(rows), _address(before), ctypes.c_int64(rows.numel()), threads)


def sum_rows(weight: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, length: int, threads: int) -> None:
    """Sum random rows, ``length`` at a time.

    Args:
        weight: float32 ``[rows, dim]``.
        rows: int64 ``[n]``.
        out: float32 ``[n / length, dim]``, whose columns lie side by side.
        length: of each bag.
        threads: of OpenMP.
    """
    counts = ctypes.c_int64(out.stride(0)), ctypes.c_int64(rows.numel()), ctypes.c_int64(length)
    _library().sum_rows(
        _address(weight), ctypes.c_int64(weight.shape[1]), _address(rows), _address(out), *counts, threads
    )


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_suffix(".cpp")
    built = Path(tempfile.mkdtemp()) / "random_gather.so"
    compiler = os.environ.get("CXX", "g++").split()
    flags = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    try:
        subprocess.run([*compiler, *flags, str(source), "-o", str(built)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRun(f"the random gathers need a C++ compiler with OpenMP: {error}") from error
    return ctypes.CDLL(str(built))
