"""Which names of torch, TorchRec and FBGEMM recfx uses, read from its sources: nothing is imported for it.

``names.txt`` has those that every set is known to have: ``tests/test_names.py`` compares, so that a new name is
looked for in the oldest and the newest set (``make names``) before it is used. What is in one version alone belongs in
``recfx/versions/differences.py``, which is not looked at.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("torch", "torchrec", "fbgemm_gpu")
KNOWN = Path(__file__).with_name("names.txt")


def used_names() -> list[str]:
    """Every name that is imported from ``PACKAGES``, or is an attribute of what was, except in ``differences.py``.

    ``torch.nn.Module`` for ``from torch import nn`` and ``nn.Module``; not what is an attribute of a local variable.
    """
    paths = sorted(path for folder in ("recfx", "kernels", "lowering") for path in (ROOT / folder).rglob("*.py"))
    names: set[str] = set()
    for path in paths:
        if path.name != "differences.py":
            names |= set(_names_in(ast.parse(path.read_text())))
    return sorted(names)


def _names_in(tree: ast.Module) -> Iterator[str]:
    """The dotted names that one file uses."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_theirs(node.module or ""):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_theirs(alias.name):
                    aliases[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
                    yield alias.name
    yield from aliases.values()
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if dotted is not None and dotted[0] in aliases:
            yield ".".join((aliases[dotted[0]], *dotted[1:]))


def _dotted(node: ast.AST) -> list[str] | None:
    """``["nn", "Module"]`` for ``nn.Module``."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return None if inner is None else [*inner, node.attr]
    return None


def _is_theirs(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def lacks(name: str) -> bool:
    """Whether what is installed here has no such name. Attributes of values, which are neither modules nor classes,
    are not looked at, and neither are operators, which libraries bring along.
    """
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], start=2):
        if not isinstance(value, type | type(sys)) or ".".join(parts[: at - 1]) in ("torch.ops", "torch.classes"):
            return False
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        try:  # also a module that its package has deleted from its names, such as torch.optim.optimizer
            value = importlib.import_module(".".join(parts[:at]))
        except ImportError:
            return True
    return False


if __name__ == "__main__":  # in the environment of a set
    missing = [name for name in used_names() if lacks(name)]
    print("\n".join(missing))
    sys.exit(bool(missing))
