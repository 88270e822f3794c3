"""The operators that exported files call: a change of their signatures needs a new version."""

import ast
from pathlib import Path

import pytest
import torch

import recfx
import recfx.exporter.serving
from recfx.exporter.manifest import OPERATOR_VERSIONS
from recfx.kernels.build import library
from tests.exporter.changed_records import forge, with_manifest
from tests.files.stored import unpack
from tests.support.refusals import refused

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
    assert set(listed) == called_by_files() == {"served_lookup", "quantized_lookup_triton", "pooled_lookup_triton"}
    schemas = {name: str(getattr(torch.ops.recfx, name).default._schema) for name in listed}
    assert schemas == {name: f"recfx::{signature}" for name, signature in listed.items()}
    assert all(signatures(version) for version in OPERATOR_VERSIONS)


@pytest.mark.skipif(not library.load(), reason="there is no C++ library")
@pytest.mark.parametrize("kind", ["own_operators", "device_own_operators"])
@pytest.mark.parametrize("version", [OPERATOR_VERSIONS[0] - 1, OPERATOR_VERSIONS[-1] + 1])
def test_a_file_that_calls_operators_of_another_version_is_refused(kind: str, version: int, tmp_path: Path) -> None:
    path = unpack(f"format_3_torch_2.13/{kind}", tmp_path)
    forge(path, tmp_path / "other", with_manifest(operators_version=version))
    with refused(
        "other_operators", match=f"calls recfx's operators of version {version}; those", error=recfx.ExportError
    ):
        recfx.load(tmp_path / "other")
