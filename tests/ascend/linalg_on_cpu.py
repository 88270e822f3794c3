"""Ascend's linalg of a kernel, built for the CPU and run: what triton-ascend made of it computes the right thing.

The text is rewritten until upstream's MLIR takes it, lowered with upstream's passes, and linked into a shared object.
What is not shown: anything that Ascend's compiler does afterwards.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.ascend import tools

_PASSES = (
    "inline",
    "convert-elementwise-to-linalg",
    "eliminate-empty-tensors",
    "empty-tensor-to-alloc-tensor",
    "one-shot-bufferize{allow-return-allocs-from-loops=1 bufferize-function-boundaries=1}",
    "symbol-dce",
    "canonicalize",
    "func.func(convert-linalg-to-loops)",
    "memref-expand",
    "expand-strided-metadata",
    "lower-affine",
    "convert-scf-to-cf",
    "arith-expand",
    "convert-math-to-llvm",
    "convert-arith-to-llvm",
    "convert-index-to-llvm",
    "finalize-memref-to-llvm",
    "convert-func-to-llvm",
    "convert-cf-to-llvm",
    "reconcile-unrealized-casts",
)
_ADDED_ARGUMENTS = 2
"""A lock and a workspace come first; sizes of the grid and the program's place in it come last, six numbers."""

_GATHER = r"func\.func private @(triton_gather\w*)\((tensor<\w+>), tensor<(\d+)xi32>, i32\) -> (tensor<\w+x(\w+)>)"
_GATHERED = r"""func.func private @\1(%values: \2, %places: tensor<\3xi32>, %axis: i32) -> \4 {
    %gathered = tensor.generate {
    ^bb0(%lane: index):
      %place = tensor.extract %places[%lane] : tensor<\3xi32>
      %index = arith.index_cast %place : i32 to index
      %value = tensor.extract %values[%index] : \2
      tensor.yield %value : \5
    } : \4
    return %gathered : \4
  }"""
"""What Ascend's compiler calls, of vectors: upstream has no operation for it."""

# Copies between strided arrays of one dimension, the only ones that kernels have, and the rounding of bfloat16.
_RUNTIME = Path(__file__).with_name("runtime.c")
_FLAGS = ("-c", "-O0", "-w", "-fPIC")


class BuildError(RuntimeError):
    """A tool refused its input; the message is its own."""


class _Array(ctypes.Structure):
    """MLIR's descriptor of an array of one dimension."""

    _fields_ = (
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


_NUMBERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


class LinalgOnCpu:
    """A kernel built from Ascend's linalg, not optimized: reads whose values are not used would be dropped and hidden.

    Args:
        linalg: its text.
    """

    def __init__(self, linalg: str) -> None:
        self.name, self._types, llvm = _for_llvm(linalg)
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder)
            (where / "kernel.ll").write_text(llvm)
            runtime, library = _runtime()
            (where / "runtime.o").write_bytes(runtime)
            _run("clang", *_FLAGS, "kernel.ll", "-o", "kernel.o", folder=where)
            _run("ld", "-shared", "kernel.o", "runtime.o", library, "-lm", "-o", "kernel.so", folder=where)
            self._library = ctypes.CDLL(str(where / "kernel.so"))  # it stays mapped when the file is gone
        self._function = getattr(self._library, f"_mlir_ciface_{self.name}")
        self._function.restype = None

    def run(self, arguments: Sequence[Any], programs: int, threads: int = 1) -> None:
        """Run all programs of a grid of one dimension, in order on one thread, or spread over several.

        Args:
            arguments: contiguous tensors, which are written in place, and numbers, in the kernel's order.
            programs: the size of the grid.
            threads: how many run at a time.
        """
        types = self._types[_ADDED_ARGUMENTS:-6]
        if len(types) != len(arguments):
            raise TypeError(f"{self.name} takes {len(types)} arguments, not {len(arguments)}")
        nothing = _Array(None, None, 0, 0, 1)
        passed = [ctypes.byref(nothing)] * _ADDED_ARGUMENTS
        passed += [_passed(value, kind) for value, kind in zip(arguments, types, strict=True)]
        grid = [ctypes.c_int32(size) for size in (programs, 1, 1)]

        def run_one(program: int) -> None:
            self._function(*passed, *grid, *(ctypes.c_int32(place) for place in (program, 0, 0)))

        if threads == 1:
            for program in range(programs):
                run_one(program)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run_one, range(programs)))


@cache
def _runtime() -> tuple[bytes, str]:
    """What kernels call, compiled, and where the compiler's own library is."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        _run("clang", *_FLAGS, str(_RUNTIME), "-o", "runtime.o", folder=where)
        library = _run("clang", "--print-libgcc-file-name", folder=where).strip()
        return (where / "runtime.o").read_bytes(), library


def _for_llvm(linalg: str) -> tuple[str, list[str], str]:
    """The name of a kernel, the types of its arguments, and LLVM's text of it."""
    text = _for_upstream(linalg)
    entry = re.search(r"func\.func @(\w+)\((.*?)\) attributes", text, re.DOTALL)
    if entry is None:
        raise BuildError("the text has no kernel")
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        (where / "kernel.mlir").write_text(text)
        pipeline = f"builtin.module({','.join(_PASSES)})"
        _run(
            "mlir-opt", "--allow-unregistered-dialect", "--mlir-disable-threading", "--pass-pipeline", pipeline,
            "kernel.mlir", "-o", "llvm.mlir", folder=where,
        )  # fmt: skip
        _run("mlir-translate", "--mlir-to-llvmir", "llvm.mlir", "-o", "kernel.ll", folder=where)
        types = [parameter.split(":", 1)[1].strip() for parameter in re.split(r",\s*(?=%)", entry[2])]
        return entry[1], types, (where / "kernel.ll").read_text().replace("@malloc(", "@undefined_memory(")


def _passed(value: Any, kind: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return _NUMBERS[kind](value)
    if not value.is_contiguous():
        raise TypeError("kernels take contiguous tensors")
    return ctypes.byref(_Array(value.data_ptr(), value.data_ptr(), 0, value.numel(), 1))


def _for_upstream(linalg: str) -> str:
    """Without the attributes of Ascend's dialects, which change no result."""
    text = re.sub(r" ?\{(?:tt|hivm)\.[^}]*\}", "", linalg)
    text = re.sub(_GATHER, _GATHERED, text)
    text = re.sub(r", hivm\.parallel_loop|hivm\.parallel_loop, ", "", text)
    return re.sub(r"attributes \{SyncBlock[^}]*\}", "attributes {llvm.emit_c_interface}", text)


def _run(name: str, *arguments: str, folder: Path) -> str:
    tool = tools.llvm_tool(name) or shutil.which(name)
    assert tool is not None, f"tests that come here require {tools.llvm().name}"
    done = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{name}: {done.stderr[-4000:]}")
    return done.stdout
