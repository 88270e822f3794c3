"""Ascend's linalg compiled by BiSheng's compiler up to HIVM, its last open stage: does it fit, and is it vectorised?

The step after HIVM is a closed program of CANN, ``hivmc``. A stand-in for it copies its input, so that the result is
HIVM with planned addresses and synchronisation. Nothing of this is a run on an NPU.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ascend.lower import CHIP

_STAND_IN = """#!/bin/sh
[ "$1" = --version ] && { echo "hivmc 0.1.0"; exit 0; }
for argument; do
  case "$argument" in *.mlir) input=$argument;; esac
  [ "$previous" = -o ] && output=$argument
  previous=$argument
done
cp "$input" "$output" && cp "$input" "$output.o"
"""
BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}


class CompileError(RuntimeError):
    """The compiler refused the kernel, or crashed; the message has its words."""


class UnifiedBufferOverflow(CompileError):
    """The kernel needs more of the unified buffer than the chip has."""


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel.

    Args:
        hivm: the text.
        ub_bytes: how far the unified buffer is used.
        lane_loops: lengths of the loops that go through a vector element by element: operations that the compiler
            could not keep as vectors.
        vector_operations: the names of the operations on vectors.
    """

    hivm: str
    ub_bytes: int
    lane_loops: tuple[int, ...]
    vector_operations: frozenset[str]


def compile_to_hivm(linalg: str, compiler: Path, chip: str = CHIP) -> Compiled:
    """Compile for one chip of the 910 generation; arguments and errors are those of ``hivm_of``."""
    return _read(hivm_of(linalg, compiler, chip))


def hivm_of(linalg: str, compiler: Path, chip: str) -> str:
    """The text of HIVM for one chip.

    Args:
        linalg: text that triton-ascend made.
        compiler: ``bishengir-compile``; for the 950 generation, ``bishengir-compile-a5``.
        chip: as the compiler calls it.

    Raises:
        UnifiedBufferOverflow: the kernel does not fit.
        CompileError: the compiler refuses the kernel for another reason.
    """
    if not os.access(compiler, os.X_OK):  # pip does not keep the mode
        compiler.chmod(0o755)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        (where / "bin").mkdir()
        for name in ("hivmc", "hivmc-a5"):
            (where / "bin" / name).write_text(_STAND_IN)
            (where / "bin" / name).chmod(0o755)
        (where / "kernel.linalg.mlir").write_text(linalg)
        command = [
            str(compiler), "kernel.linalg.mlir", f"--target={chip}", "--enable-auto-multi-buffer=True",
            "--enable-auto-bind-sub-block=True", "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true", "--mlir-disable-threading", "-o", "kernel.out",
        ]  # fmt: skip
        environment = {**os.environ, "PATH": f"{where / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            command, cwd=where, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=300, check=False,
        )  # fmt: skip
        log, output = done.stdout + done.stderr, where / "kernel.out"
        overflow = re.findall(r"ub overflow, requires (\d+) bits while (\d+) bits available", log)
        if overflow:
            needed, there = (int(bits) // 8 for bits in overflow[-1])
            raise UnifiedBufferOverflow(f"{needed} bytes of the unified buffer needed, {there} there")
        if done.returncode or not output.is_file():
            raise CompileError(f"status {done.returncode}: {log[-4000:]}")
        return output.read_text(errors="replace")


def _read(hivm: str) -> Compiled:
    constants = {
        name: int(value) for name, value in re.findall(r"(%[\w-]+) = arith\.constant (-?\d+) : (?:i64|i32|index)", hivm)
    }
    operations = frozenset(re.findall(r"hivm\.hir\.(v\w+)", hivm))
    return Compiled(hivm, _ub_bytes(hivm, constants), tuple(_lane_loops(hivm, constants)), operations)


def _ub_bytes(hivm: str, constants: dict[str, int]) -> int:
    used = 0
    cast = r"hivm\.hir\.pointer_cast\(([^)]*)\)[^\n]*? : memref<((?:\d+x)*)(\w+)[,>][^\n]*address_space<ub>"
    for addresses, shape, dtype in re.findall(cast, hivm):
        size = BYTES[dtype]
        for extent in shape.split("x")[:-1]:
            size *= int(extent)
        used = max(used, *(constants[address] + size for address in re.findall(r"%[\w-]+", addresses)))
    return used


def _lane_loops(hivm: str, constants: dict[str, int]) -> Iterator[int]:
    """Loops of a constant length with a scalar access to the unified buffer right inside."""
    open_regions: list[tuple[int | None, list[bool]]] = []
    for line in map(str.strip, hivm.splitlines()):
        if line.startswith("}") and open_regions:
            length, accessed = open_regions.pop()
            if length is not None and accessed:
                yield length
        if "address_space<ub>" in line and re.search(r"memref\.(load|store) ", line):
            loops = [region for region in open_regions if region[0] is not None]
            if loops:
                loops[-1][1].append(True)
        if line.endswith("{"):
            open_regions.append((_length_of(line, constants), []))


def _length_of(line: str, constants: dict[str, int]) -> int | None:
    """Of a loop whose bounds are constants; None for other regions."""
    bounds = re.search(r"scf\.for \S+ = (%[\w-]+) to (%[\w-]+) step (%[\w-]+)", line)
    if bounds is None or not all(name in constants for name in bounds.groups()):
        return None
    first, last, step = (constants[name] for name in bounds.groups())
    return max(0, -(-(last - first) // step))
