"""Exported collections that do not pool: the rows, lengths and ids that a file returns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor

import recfx
from recfx.kernels.lookup.quantized_rows import dequantize_rows, quantize_rows
from recfx.passes import passes
from tests.exporter import cpp_server
from tests.exporter.hashed_models import FORMATS, HASHING, IDS, SequenceModel, SequenceOutput, by_name, call, trained
from tests.support import jagged

Answer = tuple[dict[str, JaggedTensor], dict[str, JaggedTensor]]

IN_EVERY_FORMAT = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A trained model that returns rows as they are; no test changes it."""
    return SequenceOutput(trained(model=SequenceModel)).eval()


def batch(batch_size: int, **options: Any) -> KeyedJaggedTensor:
    return call(batch_size, seed=9, **options).args[1]


def assert_same(answer: Answer, expected: Answer) -> None:
    for mine, other in zip(answer, expected, strict=True):
        jagged.assert_same(mine, other)


@IN_EVERY_FORMAT
def test_rows_lengths_and_ids_are_those_of_the_model(options: dict[str, Any], model: nn.Module, tmp_path: Path) -> None:
    report = recfx.export(model, tmp_path / "model", (batch(6),), **options)
    assert [(table.collection, table.table, table.stored_as) for table in report.tables] == [
        ("wide", "shared_by_two", "fp32"),
        ("odd", "adopted", "fp32"),
        ("odd", "some_dense", "fp32"),
        ("odd", "again", "fp32"),
    ]
    loaded = recfx.load(tmp_path / "model")
    for batch_size in (0, 1, 2, 7):
        for low, high in IDS:
            features = batch(batch_size, low=low, high=high)
            expected: Answer = model(features)
            assert list(expected[1]) == ["d@adopted", "c", "d@again"]
            assert_same(loaded(features), expected)
    unknown = batch(5, low=10_000, high=20_000)
    wide = loaded(unknown)[0]
    assert wide["a"].values().shape == (int(wide["a"].lengths().sum()), 8)
    assert not wide["a"].values().any()
    assert bool((wide["a"].weights() >= 10_000).all())


@pytest.mark.parametrize("options", [FORMATS["torchscript"], FORMATS["for a device"]], ids=["torchscript", "device"])
def test_ids_and_lengths_keep_their_dtypes(options: dict[str, Any], model: nn.Module, tmp_path: Path) -> None:
    recfx.export(model, tmp_path / "model", (batch(6),), **options)
    features = batch(5)
    as_int32 = KeyedJaggedTensor(features.keys(), features.values().int(), lengths=features.lengths().int())
    expected = model(as_int32)
    assert expected[0]["a"].weights().dtype == expected[0]["a"].lengths().dtype == torch.int32
    assert_same(recfx.load(tmp_path / "model")(as_int32), expected)


OF_EACH_KIND = {"shared_by_two": "fp16", "some_dense": "int4", "again": "int8"}


@pytest.mark.parametrize(
    ("format", "quantize"),
    [
        *((format, OF_EACH_KIND) for format in FORMATS),
        ("torchscript", "int4"),
        ("with recfx's operators", "int8"),
        ("for a device", "int8"),
        ("pt2", "int4"),
        ("pt2", "fp16"),
    ],
    ids=str,
)
def test_quantized_rows_are_those_of_the_format(format: str, quantize: Any, model: nn.Module, tmp_path: Path) -> None:
    """Bit for bit; rows of 4 bits are padded to an even number of columns, and other rows beside them are not."""
    options = FORMATS[format]
    report = recfx.export(model, tmp_path / "model", (batch(6),), quantize=quantize, **options)
    plain = SequenceOutput(trained(model=SequenceModel)).eval()
    for table in report.tables:
        weight = plain.get_parameter(f"{table.collection}.embeddings.{table.table}.weight").data
        if table.stored_as == "fp16":
            weight.copy_(weight.half())
        elif table.stored_as != "fp32":
            bits, dim = int(table.stored_as[-1]), weight.size(1)
            padded = nn.functional.pad(weight, (0, dim % 2 if bits == 4 else 0), mode="replicate")
            weight.copy_(dequantize_rows(quantize_rows(padded, bits), padded.size(1), bits)[:, :dim])
    loaded = recfx.load(tmp_path / "model")
    for batch_size in (0, 1, 7):
        features = batch(batch_size)
        answer, expected = loaded(features), plain(features)
        if options.get("portable", True):
            assert_same(answer, expected)
        for by_key, expected_by_key in zip(answer, expected, strict=True):
            for key in expected_by_key:
                torch.testing.assert_close(by_key[key].values(), expected_by_key[key].values(), rtol=1e-6, atol=1e-7)


@IN_EVERY_FORMAT
def test_a_lookup_for_each_table(options: dict[str, Any], tmp_path: Path) -> None:
    """Rows come from several lookups, whose features are not adjacent."""
    alone = [pass_ for pass_ in passes() if pass_.name != "batch_lookups"]
    converted = recfx.convert(SequenceModel(), hashing=HASHING, passes=alone)
    with torch.no_grad():
        converted(*call(6).args)
    several = SequenceOutput(converted).eval()
    report = recfx.export(several, tmp_path / "model", (batch(6),), **options)
    assert report.graph.count("lookup") >= 4
    assert_same(recfx.load(tmp_path / "model")(batch(7)), several(batch(7)))


class Merged(nn.Module):
    """What code does with a dict: TorchScript has no ``update``, and its tuples no keys."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wide, self.odd = model.wide, model.odd

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        wide, odd = self.wide(features), self.odd(features)
        rows = dict(wide)
        rows.update(odd)
        if len(wide) != 2 or "d@again" not in odd or "d" in odd or odd.get("d") is not None:
            raise ValueError("the keys are others")
        by_key = [number * rows[key].to_padded_dense(3) for number, key in enumerate(odd, 1)]
        by_key += [jagged.to_padded_dense(2).sum(dim=1, keepdim=True) for jagged in odd.values()]
        by_key += [jagged.to_padded_dense(3)[:, :, :5] for key, jagged in wide.items() if key != "a"]
        return torch.cat(by_key, dim=1)


@IN_EVERY_FORMAT
def test_code_that_iterates_over_the_output(options: dict[str, Any], tmp_path: Path) -> None:
    model = Merged(trained(model=SequenceModel)).eval()
    recfx.export(model, tmp_path / "model", (batch(6),), **options)
    loaded = recfx.load(tmp_path / "model")
    for batch_size in (0, 1, 7):
        torch.testing.assert_close(loaded(batch(batch_size)), model(batch(batch_size)), rtol=0, atol=0)


@pytest.mark.parametrize(("quantize", "left"), [("int8", ["wide", "odd"]), (None, [])], ids=str)
def test_kernels_copy_rows_of_floats_and_leave_codes_to_aten(quantize: Any, left: list[str], tmp_path: Path) -> None:
    model, sample = trained(model=SequenceModel), call(7, seed=9)
    report = recfx.export(model, tmp_path / "kernel", call(6), device="npu", portable=False, quantize=quantize)
    told = [(note.code, note.path) for note in report.notes if note.by == "triton"]
    assert told == [("unsupported_combine", path) for path in left]
    assert report.graph.count("kernel=triton") == 3 - len(left)
    recfx.export(model, tmp_path / "aten", call(6), device="npu", quantize=quantize)
    answer, expected = (recfx.load(tmp_path / name)(*sample.args) for name in ("kernel", "aten"))
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("portable", [True, False], ids=["portable", "with recfx's operators"])
def test_the_server_answers_rows_lengths_and_ids(
    portable: bool, quantize: str | None, program: Path, model: nn.Module, tmp_path: Path
) -> None:
    report = recfx.export(model, tmp_path / "model", (batch(6),), quantize=quantize, portable=portable)
    loaded = recfx.load(tmp_path / "model")
    batches = [call(size, seed=size) for size in (0, 1, 7)] + [call(5, seed=3, low=-(2**63), high=2**63 - 1)]
    requests = [by_name(sample) for sample in batches]
    for request in requests:
        del request["dense"]
    options = [text for library in report.libraries for text in ("--library", str(library))]
    for request, answer in zip(
        requests, cpp_server.answers(program, tmp_path / "model", requests, *options), strict=True
    ):
        expected = loaded.serve(request)
        assert list(answer.outputs) == list(expected)
        assert "output.0.a.weights" in expected
        for name, tensor in expected.items():
            torch.testing.assert_close(answer.outputs[name], tensor, rtol=0, atol=0)
