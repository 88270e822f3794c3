"""Every kind of program answers as with contiguous tensors, however the tensors of a batch lie in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import recfx
from recfx.exporter.serving.select_bags import SelectBags
from tests.exporter.hashed_models import FORMATS, by_name
from tests.support.layouts import LAYOUTS, contiguous, laid_out
from tests.support.refusals import refused

PROGRAMS: dict[str, dict[str, Any]] = {
    **FORMATS,
    **{f"{name} of int8": {**options, "quantize": "int8"} for name, options in FORMATS.items()},
    "torchscript of int4 and fp16": {"quantize": {"hashed": "int4", "adopted": "fp16"}},
}
PARTS = ["values", "lengths", "weights", "offsets"]
KEYS = ["a", "b", "c"]


class Layouts(nn.Module):
    """Takes features in the order of its collection, so that nothing copies them on their way to the kernels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        is_pooled = kind != "sequence"
        config: Any = EmbeddingBagConfig if is_pooled else EmbeddingConfig
        tables = [
            config(name=name, embedding_dim=8, num_embeddings=40, feature_names=features)
            for name, features in (("hashed", ["a", "b"]), ("adopted", ["c"]))
        ]
        self.collection = (
            EmbeddingBagCollection(tables, is_weighted=kind == "weighted") if is_pooled else EmbeddingCollection(tables)
        )
        self.is_pooled = is_pooled
        self.linear = nn.Linear(24, 2)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.is_pooled:
            return self.linear(self.collection(features).values()) + dense
        rows = self.collection(features)
        return self.linear(torch.cat([rows[key].to_padded_dense(3).sum(1) for key in ["a", "b", "c"]], dim=1)) + dense


def _batch(batch_size: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Two ids in every bag, so that equal lengths fit them."""
    draw = torch.Generator().manual_seed(batch_size)
    ids = torch.randint(0, 40, (2 * len(KEYS) * batch_size,), generator=draw)
    lengths = torch.full((len(KEYS) * batch_size,), 2)
    weights = torch.rand(ids.numel(), generator=draw)
    return torch.rand(batch_size, 2, generator=draw), KeyedJaggedTensor(KEYS, ids, weights, lengths)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {}
    for kind in ("pooled", "weighted", "sequence"):
        torch.manual_seed(0)
        hashing = {"hashed": recfx.HashConfig(dense_rows=0), "adopted": recfx.HashConfig()}
        made[kind] = recfx.convert(Layouts(kind), hashing=hashing)
        made[kind](*_batch(6))
        made[kind].eval()
    return made


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
def test_programs_read_any_layout(kind: str, program: str, models: dict[str, nn.Module], tmp_path: Path) -> None:
    model, sample = models[kind], recfx.Sample(*_batch(6))
    recfx.export(model, tmp_path / "model", sample, **PROGRAMS[program])
    run = recfx.load(tmp_path / "model")
    different = []
    for batch_size in (6, 0):
        dense, features = _batch(batch_size)
        for part in PARTS:
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
def test_plain_tensors_of_any_layout(options: dict[str, Any], models: dict[str, nn.Module], tmp_path: Path) -> None:
    recfx.export(models["weighted"], tmp_path / "model", _batch(6), **options)
    loaded = recfx.load(tmp_path / "model")
    inputs = by_name(recfx.Sample(*_batch(5)))
    for name, layout in LAYOUTS.items():
        given = {key: layout(tensor) for key, tensor in inputs.items()}
        expected = loaded.serve({key: contiguous(tensor) for key, tensor in given.items()})
        assert torch.equal(loaded.serve(given)["output"], expected["output"]), name


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_negated_views_in_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    """A table that is one, and a parameter, as of rotations: a pt2 file has no sign of a view."""
    model, sample = Layouts("pooled").eval(), _batch(6)
    for part in (model.collection.embedding_bags["adopted"], model.linear):
        part.weight = nn.Parameter(torch._neg_view(-part.weight.detach()))
    recfx.export(model, tmp_path / "model", sample, **options)
    torch.testing.assert_close(recfx.load(tmp_path / "model")(*sample), model(*sample), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_an_export_finds_that_a_program_takes_tensors_for_contiguous(
    quantize: Any, models: dict[str, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contiguous(self: SelectBags, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    monkeypatch.setattr(SelectBags, "contiguous", contiguous)
    with refused("not_scriptable", match="not contiguous", error=recfx.ExportError):
        recfx.export(models["weighted"], tmp_path / "model", _batch(6), quantize=quantize)
