"""Builds ``examples/serve_cpp`` and runs it."""

import fcntl
import io
import json
import os
import re
import shutil
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any

import fbgemm_gpu
import pytest
import torch
from torch.utils import cpp_extension

from examples.serve_cpp.client import Answer, parse_answers, request_text
from recfx.exporter.model_file import MANIFEST_RECORD

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "examples/serve_cpp"
REQUIRED = "RECFX_SERVE_REQUIRED"
"""Set where every tool has to be there (in CI): a missing one is a failure then, and not a skipped test."""

SANITIZE = "RECFX_SERVE_SANITIZE"
"""Set where the whole server is compiled with sanitizers: `make serve-sanitized`."""

# Nothing is suppressed: the sanitizers find nothing in torch and FBGEMM either, as far as they see into them.
SANITIZER_SETTINGS = {"ASAN_OPTIONS": "abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}


def missing_tool() -> str:
    """What the server cannot be built without; empty if everything is there."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    for tool, package in (("cmake", "cmake"), ("make", "make"), (compiler, "g++")):
        if shutil.which(tool) is None:
            return f"there is no {tool}; `apt-get install {package}` installs it"
    nvcc = shutil.which("nvcc")
    if torch.version.cuda and not (nvcc and (Path(nvcc).resolve().parents[1] / "include/cuda_runtime.h").is_file()):
        return "torch is a build for CUDA, whose CMake files ask for CUDA's compiler and headers"
    has_zlib = subprocess.run(
        [compiler, "-E", "-x", "c++", "-"], input="#include <zlib.h>", capture_output=True, text=True, check=False
    )
    return (
        "" if has_zlib.returncode == 0 else "there are no headers of zlib; `apt-get install zlib1g-dev` installs them"
    )


def build(sanitize: bool = bool(os.environ.get(SANITIZE))) -> Path:
    """Compile what has changed, and return the program."""
    folder = ROOT / "build" / ("serve_cpp-sanitized" if sanitize else "serve_cpp")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = ["cmake", "-S", SOURCES, "-B", folder, "-G", "Unix Makefiles", "-DCMAKE_BUILD_TYPE=Release"]
        torch_at = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
        _run([*configure, torch_at, f"-DSANITIZE={'ON' if sanitize else 'OFF'}"])
        _run(["cmake", "--build", folder, "--parallel", "2"])
    return folder / "recfx_serve"


def build_stranger(folder: Path) -> Path:
    """Compile a program of somebody else's that loads files, and return it."""
    program, libraries = folder / "stranger", f"{torch.__path__[0]}/lib"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX", "c++").split()
    _run([*compiler, "-std=c++20", *includes, Path(__file__).parent / "stranger.cpp", *linked, "-ldl", "-o", program])
    return program


def fbgemm_libraries() -> list[Path]:
    """What the server loads of FBGEMM, in its order."""
    listed = (SOURCES / "served_model.cpp").read_text().partition("kFbgemmLibraries[] = {")[2].partition("}")[0]
    return [Path(fbgemm_gpu.__file__).parent / f"{name}.so" for name in re.findall(r'"(\w+)"', listed)]


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def require() -> None:
    """Skip the tests where the server cannot be built, or fail them where every tool has to be there."""
    if missing := missing_tool():
        if os.environ.get(REQUIRED):
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)


def environment() -> dict[str, str]:
    """The server's environment, in which nothing could lead it to this Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "OMP_"))}
    return {**SANITIZER_SETTINGS, **kept}


def run(program: Path, *arguments: str | Path, text: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the server to its end, with requests on its standard input; ``options`` are those of ``subprocess.run``."""
    return subprocess.run(
        [program, *arguments],
        input=text,
        capture_output=True,
        check=False,
        timeout=300,
        env=environment(),
        encoding="utf-8",
        errors="surrogateescape",
        **options,
    )


def answers(program: Path, model: Path, requests: list[dict[str, torch.Tensor]], *options: str) -> list[Answer]:
    """The answers to some requests, in their order."""
    text = "".join(request_text(str(number), inputs) for number, inputs in enumerate(requests))
    done = run(program, model, *options, text=text)
    assert done.returncode == 0, done.stderr
    received = sorted(parsed(done.stdout), key=lambda answer: int(answer.id))
    assert [answer.id for answer in received] == [str(number) for number in range(len(requests))]
    return received


def parsed(text: str) -> list[Answer]:
    """The answers in what the server has printed."""
    return list(parse_answers(io.StringIO(text, newline="\n")))


def version_of(path: Path) -> str:
    """The version that the server gives to a file: the first digits of that in its manifest, if there is one."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(MANIFEST_RECORD))
        checksums = b"".join(struct.pack("<I", info.CRC) for info in archive.infolist())
        version: str = json.loads(archive.read(name)).get("version", f"{zlib.crc32(checksums):08x}")
    return version[:8]
