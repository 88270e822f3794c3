"""Names of torch, TorchRec and FBGEMM that recfx uses are known to be in the oldest and in the newest set."""

from __future__ import annotations

import ast

import pytest

from tests.tools.matrix import names


def test_every_name_is_known() -> None:
    known = names.KNOWN.read_text().split()
    assert names.used_names() == known, "make names"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from torch import nn\nnn.Module()", {"torch.nn", "torch.nn.Module"}),
        ("import torch.fx as f\nf.Graph", {"torch.fx", "torch.fx.Graph"}),
        ("import torchrec.sparse\ntorchrec.sparse.x", {"torchrec.sparse", "torchrec", "torchrec.sparse.x"}),
        ("import json\njson.x\nfrom recfx import y\ny.z", set()),
    ],
)
def test_names_in_a_file(text: str, expected: set[str]) -> None:
    assert set(names._names_in(ast.parse(text))) - {"torchrec"} == expected - {"torchrec"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.nn.Module", False),
        ("torch.nn.Modul", True),
        ("torch.fx.no_such_module.Name", True),
        ("torchrec.modules.embedding_configs.DataType.FP32", False),
        ("torch.ops.recfx.anything", False),
    ],
)
def test_a_name_that_is_lacking(name: str, expected: bool) -> None:
    assert names.lacks(name) is expected
