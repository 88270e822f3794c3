"""The environment of a set: ``.sets/2.7`` has its packages, without CUDA's libraries, and its C++ library."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tools.matrix.stand_ins import stand_in

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".sets"

# What torch, TorchRec and tensordict need besides each other and CUDA; and what tests need, as it is installed here.
_OTHERS = (
    "cloudpickle", "filelock", "fsspec", "importlib_metadata", "iopath", "jinja2", "lightning-utilities", "networkx",
    "numpy", "orjson", "packaging", "pyre-extensions", "pyvers", "rich", "setuptools>=77.0.3,<82", "sympy>=1.13.3",
    "tqdm", "typing-extensions",
)  # fmt: skip
_TESTS = ("hypothesis", "mutmut", "pytest", "pytest-timeout", "pytest-xdist")


class Environment:
    """Made when it is first asked for, and again if its packages change.

    Args:
        versions: a row of ``recfx.versions.sets.SETS``.
    """

    def __init__(self, versions: Any) -> None:
        self.folder = FOLDER / versions.name
        self.python = self.folder / "bin" / "python"
        pins = {
            "torch": versions.torch, "torchrec": versions.torchrec, "fbgemm-gpu-cpu": versions.fbgemm,
            "triton": versions.triton, "tensordict": versions.tensordict, "torchmetrics": "1.0.3",
        }  # fmt: skip
        self._pinned = [f"{name}=={version}" for name, version in pins.items()]
        self._others = [*_OTHERS, *(f"{name}=={importlib.metadata.version(name)}" for name in _TESTS)]

    def make(self) -> None:
        """Create it, unless it is there with the same packages."""
        made = self.folder / "made-of.txt"
        packages = "\n".join((sys.version, *self._pinned, *self._others))
        if made.is_file() and made.read_text() == packages:
            return
        venv.create(self.folder, clear=True, with_pip=True)
        install = [self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, "--no-deps", *self._pinned], check=True)
        subprocess.run([*install, *self._others], check=True)
        (torch,) = self.folder.glob("lib/python3*/site-packages/torch/lib")
        stand_in(torch)
        made.write_text(packages)

    def run(self, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run its Python in the root of the project."""
        return subprocess.run(
            [self.python, *arguments], env=self._variables(), cwd=ROOT, text=True, check=False, **options
        )

    def _variables(self) -> Mapping[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "RECFX_BUILD_DIR": str(self.folder / "build")}
