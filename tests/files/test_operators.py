"""The operators that exported files call: a change of their signatures needs a new version."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import recfx.exporter.serving
from recfx.exporter.manifest import OPERATOR_VERSIONS
from recfx.kernels.build import library

LISTED = Path(__file__).with_name("operators.txt").read_text().splitlines()[1:]


def signatures(version: int) -> dict[str, str]:
    """The listed signatures of a version, by the operator's name."""
    listed = (line.partition(" ")[2] for line in LISTED if line.startswith(f"{version} "))
    return {signature.partition("(")[0]: signature for signature in listed}


def called_by_files() -> set[str]:
    """The operators of recfx that the modules of exported files call."""
    folder = Path(recfx.exporter.serving.__file__).parent
    calls = (ast.unparse(node) for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    prefix = "torch.ops.recfx."
    return {call.removeprefix(prefix) for call in calls if call.startswith(prefix) and call.count(".") == 3}


@pytest.mark.skipif(not library.load(), reason="there is no C++ library")
def test_a_signature_that_changes_gets_a_new_version() -> None:
    """If this fails, add a version to ``OPERATOR_VERSIONS``, to ``library.cpp`` and, with signatures, to the list."""
    oldest, newest = torch.ops.recfx.file_operator_versions()
    assert range(oldest, newest + 1) == OPERATOR_VERSIONS
    listed = signatures(newest)
    assert set(listed) == called_by_files() == {"served_lookup", "quantized_lookup_triton"}
    schemas = {name: str(getattr(torch.ops.recfx, name).default._schema) for name in listed}
    assert schemas == {name: f"recfx::{signature}" for name, signature in listed.items()}
    assert all(signatures(version) for version in OPERATOR_VERSIONS)
