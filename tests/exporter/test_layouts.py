"""Every kind of program answers as with contiguous tensors, however the tensors of a batch lie in memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.exporter.hashed_models import FEATURES, FORMATS, SequenceModel, by_name, call, trained
from tests.support.layouts import LAYOUTS, contiguous, laid_out

PROGRAMS: dict[str, dict[str, Any]] = {
    **FORMATS,
    **{f"{name} of int8": {**options, "quantize": "int8"} for name, options in FORMATS.items()},
    "torchscript of fp16": {"quantize": "fp16"},
    "torchscript of several": {"quantize": {"mean": "int4", "adopted": "int8", "some_dense": "fp16"}},
    "torch.jit.script": {},
    "torch.export": {},
}
PARTS = ["values", "lengths", "weights", "offsets"]


def _batch(batch_size: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Two ids in every bag, so that equal lengths fit them; all ids may be rows."""
    draw = torch.Generator().manual_seed(batch_size)
    ids = torch.randint(0, 20, (2 * len(FEATURES) * batch_size,), generator=draw)
    lengths = torch.full((len(FEATURES) * batch_size,), 2)
    return torch.rand(batch_size, 1, generator=draw), KeyedJaggedTensor(
        FEATURES, ids, torch.rand(ids.numel(), generator=draw), lengths
    )


@pytest.fixture(scope="module", params=["pooled", "weighted", "sequence"])
def model(request: pytest.FixtureRequest, model_of: dict[bool, nn.Module]) -> nn.Module:
    return trained(model=SequenceModel) if request.param == "sequence" else model_of[request.param == "weighted"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_read_any_layout(model: nn.Module, program: str, tmp_path: Path) -> None:
    sample = recfx.Sample(*_batch(6))
    if program == "torch.jit.script":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run: Any = torch.jit.script(recfx.trace(model, sample))
    elif program == "torch.export":
        run = torch.export.export(model, sample.args).module()
    else:
        recfx.export(model, tmp_path / "model", sample, **PROGRAMS[program])
        run = recfx.load(tmp_path / "model")
    different = []
    for batch_size in (6,) if program == "torch.export" else (6, 0):
        dense, features = _batch(batch_size)
        for part in PARTS[: 3 + (program != "torch.export")]:
            for name, layout in LAYOUTS.items():
                if (part, name) == ("offsets", "expanded"):  # no offsets of bags
                    continue
                given = laid_out(features, part, layout)
                expected = run(dense, laid_out(features, part, lambda tensor: contiguous(layout(tensor))))  # noqa: B023
                if not torch.equal(run(dense, given), expected):
                    different.append((batch_size, part, name))
        for name, layout in LAYOUTS.items():
            if not torch.equal(run(layout(dense), features), run(contiguous(layout(dense)), features)):
                different.append((batch_size, "dense", name))
    assert not different


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_plain_tensors_of_any_layout(options: dict[str, Any], model_of: dict[bool, nn.Module], tmp_path: Path) -> None:
    recfx.export(model_of[True], tmp_path / "model", call(6, is_weighted=True), **options)
    loaded = recfx.load(tmp_path / "model")
    inputs = by_name(recfx.Sample(*_batch(5)))
    for name, layout in LAYOUTS.items():
        given = {key: layout(tensor) for key, tensor in inputs.items()}
        expected = loaded.serve({key: contiguous(tensor) for key, tensor in given.items()})
        assert torch.equal(loaded.serve(given)["output"], expected["output"]), name
