"""Setuptools' build backend, but an editable install is found where a script lies beside a clone called recfx.

Python takes such a folder, in which there is no ``__init__.py``, for an empty namespace package, and asks the finder of
an editable install no more. What is on the path as a package, such as by PYTHONPATH, still comes before it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403, the other hooks

_NAME = "__editable___recfx_clone"  # after setuptools' own in the order of names
_FINDER = '''"""Finds the editable install of recfx where the path has no more than a folder of that name."""

import sys
from importlib.machinery import PathFinder


class CloneFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        found = PathFinder.find_spec(name) if name == "recfx" else None
        if found is None or found.origin is not None:
            return None
        installed = (one for one in sys.meta_path if getattr(one, "__module__", "").startswith("__editable___recfx_"))
        specs = (one.find_spec(name) for one in installed if one is not CloneFinder)
        return next(filter(None, specs), None)


sys.meta_path.insert(0, CloneFinder)
'''


def build_editable(wheel_directory: str, *settings: Any, **named: Any) -> str:
    """Build it as setuptools does, and add the finder."""
    name: str = build_meta.build_editable(wheel_directory, *settings, **named)
    added = {f"{_NAME}.py": _FINDER, f"{_NAME}.pth": f"import {_NAME}\n"}
    path = Path(wheel_directory, name)
    with zipfile.ZipFile(path) as wheel:
        files = {entry: wheel.read(entry) for entry in wheel.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for entry, content in files.items():
            is_record = entry.filename.endswith(".dist-info/RECORD")
            wheel.writestr(entry, content + "".join(f"{file},,\n" for file in added).encode() * is_record)
        for file, text in added.items():
            wheel.writestr(file, text)
    return name
