"""Files for devices with recfx's kernels in Triton: they answer as files of ATen alone.

On the CPU, its reference computes; ``tests/ascend`` runs this file again where Triton's interpreter runs the kernel.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

import recfx
from recfx.exporter import load
from recfx.kernels.build import launch
from tests.exporter.hashed_models import call
from tests.support.refusals import refused

KEYS = ["a", "b", "c", "d", "e"]


class StaticModel(nn.Module):
    """Sums and means in turn, of odd widths, without indexes: a lookup of each, whose features are not adjacent."""

    def __init__(self, dims: tuple[int, ...] = (3, 17, 64, 1), is_weighted: bool = False) -> None:
        super().__init__()
        poolings = [PoolingType.SUM, PoolingType.SUM if is_weighted else PoolingType.MEAN] * 2
        keys = [["a"], ["b", "e"], ["c"], ["d"]]
        tables = [
            EmbeddingBagConfig(
                name=f"t{number}", embedding_dim=dim, num_embeddings=20, feature_names=keys[number], pooling=pooling
            )
            for number, (dim, pooling) in enumerate(zip(dims, poolings, strict=False))
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values()


def batch(batch_size: int, longest: int = 4, is_weighted: bool = False) -> KeyedJaggedTensor:
    """Ids of rows, in bags of up to ``longest`` of them."""
    draw = torch.Generator().manual_seed(batch_size)
    lengths = torch.randint(0, longest + 1, (len(KEYS) * batch_size,), generator=draw)
    ids = torch.randint(0, 20, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor(KEYS, ids, torch.rand(ids.numel(), generator=draw) if is_weighted else None, lengths)


def both(model: nn.Module, sample: recfx.Sample, path: Path, **options: Any) -> list[recfx.LoadedModel]:
    """A file with the kernel and one of ATen alone."""
    for name, portable in (("kernel", False), ("aten", True)):
        report = recfx.export(model, path / name, sample, device="cuda", portable=portable, **options)
        assert f"kernel={'aten' if portable else 'triton'}" in report.graph
        assert f"kernel={'triton' if portable else 'aten'}" not in report.graph
        assert [note.code for note in report.notes] == ([] if portable else ["needs_python"])
    return [recfx.load(path / name) for name in ("kernel", "aten")]


@pytest.mark.parametrize("quantize", [None, "fp16", "int8", "int4"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_hashed_models(is_weighted: bool, quantize: Any, model_of: dict[bool, nn.Module], tmp_path: Path) -> None:
    """Ids without a row, id -1, and means whose bags count ids without a row."""
    sample = call(6, is_weighted=is_weighted)
    files = both(model_of[is_weighted], sample, tmp_path, quantize=quantize)
    for batch_size in (0, 1, 7):
        for low, high in ((-20, 20), (-(2**63), 2**63 - 1), (10_000, 20_000)):
            arguments = call(batch_size, seed=9, low=low, high=high, is_weighted=is_weighted).args
            answer, expected = (file(*arguments) for file in files)
            torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("is_weighted", "quantize"),
    [
        (False, "int8"),
        (True, "int4"),
        (False, {"t0": "int4", "t1": "int8", "t2": "int4", "t3": "int8"}),
        (True, None),
        (False, {"t0": "fp16", "t2": "fp16"}),
    ],
    ids=["int8", "weighted int4", "int4 sums and int8 means", "weighted", "fp16 sums and fp32 means"],
)
def test_lookups_of_sums_and_of_means(is_weighted: bool, quantize: Any, tmp_path: Path) -> None:
    model = recfx.convert(StaticModel(is_weighted=is_weighted), hashing=None)
    files = both(model, recfx.Sample(batch(4, is_weighted=is_weighted)), tmp_path, quantize=quantize)
    for batch_size, longest in ((0, 0), (1, 4), (7, 3), (3, 0), (2, 40)):
        kjt = batch(batch_size, longest, is_weighted)
        answer, expected = (file(kjt) for file in files)
        assert answer.shape == (batch_size, 3 + 2 * 17 + 64 + 1)
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("quantize", "kernel"), [("int8", "quantized_lookup"), (None, "pooled_lookup")])
def test_files_call_the_operator_and_it_the_kernel(
    quantize: Any, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    real = launch.launch

    def counting(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)
        real(kernel, *arguments, **constants)

    model = recfx.convert(StaticModel(), hashing=None)
    file, _ = both(model, recfx.Sample(batch(4)), tmp_path, quantize=quantize)
    script: Any = torch.jit.load(str(tmp_path / "kernel"))
    assert {name for name in torch.jit.export_opnames(script) if not name.startswith(("aten::", "prim::"))} == {
        f"recfx::{kernel}_triton"
    }
    assert file.manifest["portable"] is False
    monkeypatch.setattr(launch, "launch", counting)
    file(batch(3))
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    assert launched == [f"recfx_{kernel}"] * 2 * is_interpreted  # of sums, of means


@pytest.mark.parametrize(
    ("dims", "quantize", "code", "message"),
    [
        ((4, 4, 4), {"t0": "int8"}, "dtype", "stored alike, not of fp32, int8"),
        ((4, 4, 4), {"t0": "int8", "t2": "int4"}, "dtype", "stored alike, not of int4, int8"),
        ((1025,), "int8", "too_many_columns", "up to 1024 columns, table 't0' has 1025"),
    ],
    ids=["codes and floats", "several forms", "wide"],
)
def test_what_the_kernel_does_not_take_is_left_to_aten_and_said(
    dims: tuple[int, ...], quantize: Any, code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = recfx.convert(StaticModel(dims), hashing=None)
    keys = KEYS[: len(dims)] if len(dims) < 2 else [*KEYS[: len(dims)], "e"]
    features = batch(4).permute([KEYS.index(key) for key in keys])
    options = {"quantize": quantize, "device": "npu"}
    report = recfx.export(model, tmp_path / "model", (features,), portable=False, **options)
    refused = [record for record in report.passes["ebc"] if record.name == "lower"][-1].declined
    first = refused[0]
    assert (first.code, first.path, first.by) == (code, "ebc", "triton")
    assert first.node in report.graph
    assert message in first.message
    assert set(report.notes) >= set(refused)
    if "kernel=triton" not in report.graph:
        assert "needs_python" not in [note.code for note in report.notes]
        monkeypatch.setattr(launch, "why_not", lambda device: "there is no Triton.")
        assert recfx.load(tmp_path / "model").manifest["portable"] is True
    recfx.export(model, tmp_path / "aten", (features,), **options)
    expected = recfx.load(tmp_path / "aten")(features)
    torch.testing.assert_close(recfx.load(tmp_path / "model")(features), expected, rtol=1e-5, atol=1e-5)


def test_a_device_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says what it needs before anything is moved there."""
    model = recfx.convert(StaticModel(), hashing=None)
    recfx.export(model, tmp_path / "model", (batch(4),), quantize="int8", device="cuda", portable=False)
    monkeypatch.setattr(load, "usable_device", torch.device)  # as if every device were here
    monkeypatch.setattr(launch, "why_not", lambda device: "Triton is not installed: pip install triton.")
    with refused("no_triton", match=r"on cuda:0: Triton is not installed.*portable=True", error=recfx.ExportError):
        recfx.load(tmp_path / "model", device="cuda:0")
    assert recfx.load(tmp_path / "model")(batch(2)).shape[0] == 2


@pytest.mark.parametrize("options", [{"device": "mps"}, {"device": "cuda", "format": "pt2"}], ids=str)
def test_where_there_is_no_kernel(options: dict[str, str], tmp_path: Path) -> None:
    model = recfx.convert(StaticModel(), hashing=None)
    with refused("invalid_argument", match="portable=False for", error=recfx.ExportError):
        recfx.export(model, tmp_path / "model", (batch(4),), quantize="int8", portable=False, **options)
    assert not (tmp_path / "model").exists()
