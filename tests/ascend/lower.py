"""Kernels lowered by triton-ascend: Triton's IR, and the linalg that Ascend's compiler takes.

This file is also the program that lowers: triton-ascend's ``triton`` takes the place of the stock one, so it runs in
a process of its own.
"""

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHIP = "Ascend910B3"


class LoweringError(RuntimeError):
    """A kernel that triton-ascend does not lower; the message is its own."""


@dataclass(frozen=True)
class Lowered:
    """The text of a kernel's two forms."""

    ttir: str
    linalg: str


def lower(cases: Iterable[Any], triton_ascend: Path) -> dict[str, Lowered | LoweringError]:
    """Lower all cases in one process; by name of the case.

    Args:
        cases: ``KernelCase``s.
        triton_ascend: the folder that holds triton-ascend's ``triton``.
    """
    asked = [
        {"name": case.name, "kernel": case.kernel, "signature": case.signature, "constexprs": case.constexprs}
        for case in cases
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(triton_ascend), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the process that lowers ended with status {done.returncode}:\n{done.stderr}")
    answers: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return {
        name: LoweringError(answer["error"]) if "error" in answer else Lowered(**answer)
        for name, answer in answers.items()
    }


def _main() -> None:
    sys.path.append(str(ROOT))
    answers = {asked["name"]: _lower_one(asked) for asked in json.load(sys.stdin)}
    print(json.dumps(answers))


def _function(place: str) -> Any:
    """``module:function``, without running what packages import: torch, which looks for a Triton of its own."""
    module, _, name = place.partition(":")
    packages = module.split(".")[:-1]
    for depth in range(1, len(packages) + 1):
        package = types.ModuleType(".".join(packages[:depth]))
        package.__path__ = [str(ROOT.joinpath(*packages[:depth]))]
        sys.modules.setdefault(package.__name__, package)
    return getattr(import_module(module), name)


def _lower_one(asked: dict[str, Any]) -> dict[str, str]:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    constexprs = {
        name: _function(value) if isinstance(value, str) else value for name, value in asked["constexprs"].items()
    }
    source = ASTSource(_function(asked["kernel"]), asked["signature"], constants=constexprs)
    target = GPUTarget("npu", CHIP, 0)
    backend = make_backend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    metadata = {"hash": source.hash(), "target": target, **options.__dict__}
    try:
        made = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        ttir = stages["ttir"](made, metadata)
        text = str(ttir)  # the next stage changes it
        return {"ttir": text, "linalg": str(stages["ttadapter"](ttir, metadata))}
    except subprocess.CalledProcessError as error:
        return {"error": error.stderr.decode(errors="replace") if error.stderr else str(error)}
    except Exception as error:  # triton's own errors have no common base
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    _main()
