"""The tools that the checks for Ascend need: which versions, where they are, and what happens where one is missing.

``make ascend`` installs those of PyPI below ``.ascend/``, each into a folder of its own: stock Triton and
triton-ascend both bring a package called ``triton``, and the versions of ascendnpu-ir would overwrite each other.
LLVM 19 is a package of the system.
"""

import importlib.metadata
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("RECFX_ASCEND_TOOLS", ROOT / ".ascend"))
REQUIRED = "RECFX_ASCEND_REQUIRED"
"""Set where every tool has to be there (in CI): a missing one is a failure then, and not a skipped test."""

TRITON, TRITON_ASCEND, TORCH_NPU, LLVM = "3.7.0", "3.2.0", "2.13.0", "19"
ASCENDNPU_IR = ("1.0.0", "1.2.0")


@dataclass(frozen=True)
class Tool:
    """A tool, and what is missing of it (``""``: nothing).

    Args:
        name: with its version.
        missing: what was looked for in vain, and how it is installed.
    """

    name: str
    missing: str

    def require(self) -> None:
        """Skip the test, or fail it where every tool has to be there."""
        if not self.missing:
            return
        if os.environ.get(REQUIRED):
            pytest.fail(f"{self.name}: {self.missing}", pytrace=False)
        pytest.skip(f"{self.name}: {self.missing}")


def triton() -> Tool:
    """Stock Triton, in the environment of the tests: the interpreter, and the compiler for NVIDIA."""
    installed = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None
    return Tool(
        f"triton {TRITON}", "" if installed == TRITON else f"found {installed or 'none'}; `make ascend` installs it"
    )


def triton_ascend_folder() -> Path:
    """Goes in front of ``sys.path`` of the process that lowers."""
    return FOLDER / f"triton-ascend-{TRITON_ASCEND}"


def triton_ascend() -> Tool:
    """The lowering to Ascend's linalg."""
    missing = "" if (triton_ascend_folder() / "triton/backends/ascend").is_dir() else _not_in(triton_ascend_folder())
    return Tool(f"triton-ascend {TRITON_ASCEND}", missing)


def bishengir_compile(version: str) -> Path:
    """The compiler of one version of ascendnpu-ir."""
    return FOLDER / f"ascendnpu-ir-{version}" / "ascendnpuir/bin/bishengir-compile"


def bishengir_opt(version: str, is_950: bool) -> Path:
    """The tool beside it that runs single passes, of one of the two generations of chips."""
    program = bishengir_compile(version).with_name(f"bishengir-opt{'-a5' if is_950 else ''}")
    if program.is_file() and not os.access(program, os.X_OK):  # pip does not keep the mode
        program.chmod(0o755)
    return program


def ascendnpu_ir(version: str) -> Tool:
    """BiSheng's compiler up to HIVM, its last open stage."""
    compiler = bishengir_compile(version)
    return Tool(f"ascendnpu-ir {version}", "" if compiler.is_file() else _not_in(compiler.parents[2]))


def llvm_tool(name: str) -> str | None:
    """The path of a tool of LLVM 19, under its versioned name or in Debian's folder."""
    return shutil.which(f"{name}-{LLVM}") or shutil.which(name, path=f"/usr/lib/llvm-{LLVM}/bin")


def llvm() -> Tool:
    """What turns Ascend's linalg into a shared object for the CPU."""
    absent = [name for name in ("mlir-opt", "mlir-translate", "clang") if llvm_tool(name) is None]
    advice = f"no {', '.join(absent)}; on Debian: apt-get install mlir-{LLVM}-tools clang-{LLVM}"
    return Tool(f"LLVM {LLVM}", advice if absent else "")


def torch_npu_folder() -> Path:
    """Goes into ``PYTHONPATH`` of the process that sees a simulated NPU, and of no other: see ``npu_runtime``."""
    return FOLDER / f"torch-npu-{TORCH_NPU}"


def torch_npu() -> Tool:
    """Ascend's package for torch, without CANN."""
    missing = "" if (torch_npu_folder() / "torch_npu").is_dir() else _not_in(torch_npu_folder())
    return Tool(f"torch_npu {TORCH_NPU}", missing)


def c_compiler() -> str | None:
    return shutil.which("cc") or llvm_tool("clang")


def c_tools() -> Tool:
    """What builds the libraries that stand in for CANN's."""
    absent = [name for name, path in (("cc", c_compiler()), ("nm", shutil.which("nm"))) if path is None]
    return Tool("C compiler", f"no {', '.join(absent)}; on Debian: apt-get install gcc" if absent else "")


def every_tool() -> list[Tool]:
    """All of them, in the order in which a kernel meets them."""
    compilers = [ascendnpu_ir(version) for version in ASCENDNPU_IR]
    return [triton(), triton_ascend(), llvm(), *compilers, torch_npu(), c_tools()]


def _not_in(folder: Path) -> str:
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    return f"not in {shown}; `make ascend` installs it"
