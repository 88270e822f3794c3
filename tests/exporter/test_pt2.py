"""Files of format ``pt2``: the answers and errors of TorchScript files, from a program of ``torch.export``."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.exporter import hashed_models
from tests.exporter.conftest import UsualExport
from tests.exporter.hashed_models import call
from tests.support.refusals import refused

IDS = ((-20, 20), (-(2**63), 2**63 - 1), (10_000, 20_000))  # seen in training, extreme, never seen


@pytest.fixture(scope="module")
def file(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    recfx.export(model, path, call(6), format="pt2")
    return path


@pytest.fixture(scope="module")
def exported(file: Path) -> nn.Module:
    """What servers have that call it without ``recfx.load``."""
    return torch.export.load(io.BytesIO(file.read_bytes())).module()


def test_a_sample_of_one(model: nn.Module, tmp_path: Path) -> None:
    report = recfx.export(model, tmp_path / "model", call(1), format="pt2")
    assert report.format == "pt2"
    assert "fbgemm.pruned_hashmap_lookup" in report.graph
    sample = call(7, seed=9)
    assert torch.allclose(recfx.load(tmp_path / "model")(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)


def test_an_empty_sample_says_nothing_of_a_batch(model: nn.Module, tmp_path: Path) -> None:
    with refused("not_exportable", match="size 0 of dense is 0", error=recfx.ExportError):
        recfx.export(model, tmp_path / "model", call(0), format="pt2")


class Concatenated(nn.Module):
    """Dense inputs beside a collection whose keys are permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.over = nn.Linear(34, 1)

    def forward(self, wide: Tensor, narrow: Tensor, padded: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(features.permute([2, 0, 1])).values()
        return self.over(torch.cat([wide, narrow, pooled], dim=1)) + padded.sum(dim=1, keepdim=True)


class Checked(nn.Module):
    """Takes batches without ids, but no zero; TorchRec asserts for tracers that the permuted batch has ids."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()

    def forward(self, number: Tensor, features: KeyedJaggedTensor) -> Tensor:
        divisor = number.item()
        torch._check(divisor != 0)
        pooled: Tensor = self.ebc(features.permute([2, 0, 1])).values()
        return pooled * divisor


def test_what_the_model_checks_itself_is_checked_by_the_file(tmp_path: Path) -> None:
    model, features = recfx.convert(Checked()).eval(), batch(3)
    recfx.export(model, tmp_path / "model", (torch.tensor(2), features), format="pt2")
    loaded = recfx.load(tmp_path / "model")
    empty = KeyedJaggedTensor(features.keys(), features.values()[:0], lengths=torch.zeros_like(features.lengths()))
    assert torch.equal(loaded(torch.tensor(3), empty), model(torch.tensor(3), empty))
    with pytest.raises(RuntimeError, match="Ne"):
        loaded(torch.tensor(0), features)


def test_sizes_that_no_batch_changes_are_those_of_the_sample(tmp_path: Path) -> None:
    def batch_of(size: int, longest: int = 4) -> tuple[Any, ...]:
        return torch.rand(size, 6), torch.rand(size, 4), torch.rand(size, 5), batch(size, longest=longest)

    model = recfx.convert(Concatenated().eval())
    recfx.export(model, tmp_path / "model", batch_of(6), format="pt2")
    loaded = recfx.load(tmp_path / "model")
    for sample in (batch_of(6), batch_of(1), batch_of(3, longest=0)):
        assert torch.allclose(loaded(*sample), model(*sample), rtol=1e-5, atol=1e-6)
    for wide, reason in (
        (torch.rand(6, 5), "wrong_size"), (torch.rand(6), "wrong_rank"), (torch.ones(6, 6).long(), "wrong_dtype")
    ):  # fmt: skip
        with refused(reason, error=recfx.InputError):
            loaded(wide, *batch_of(6)[1:])


@pytest.mark.parametrize(
    ("is_true", "reason"),
    [
        (lambda wide, narrow, padded: wide.shape[0] == 9, "not_exportable"),
        (lambda wide, narrow, padded: wide.shape[0] == 0, "not_exportable"),
        (lambda wide, narrow, padded: narrow.shape[1] == padded.shape[1], "wrong_size"),
        (lambda wide, narrow, padded: padded.shape[1] % 2 == 0, "wrong_size"),
        (lambda wide, narrow, padded: padded.shape[1] == 1, "wrong_size"),
    ],
)
def test_a_program_takes_no_sizes_for_which_the_model_takes_another_branch(
    is_true: Callable[..., bool], reason: str, tmp_path: Path
) -> None:
    class Branches(Concatenated):
        def forward(self, wide: Tensor, narrow: Tensor, padded: Tensor, features: KeyedJaggedTensor) -> Tensor:
            y = super().forward(wide, narrow, padded, features)
            return y.sum(0) * 2 if is_true(wide, narrow, padded) else y.mean(0)

    model = recfx.convert(Branches().eval())
    with refused(reason, error=recfx.RecfxError):
        sample = torch.rand(6, 6), torch.rand(6, 4), torch.rand(6, 5), batch(6)
        recfx.export(model, tmp_path / "model", sample, format="pt2")
        recfx.load(tmp_path / "model")(torch.rand(9, 6), torch.rand(9, 4), torch.rand(9, 4), batch(9))


def test_what_torch_cannot_trace_is_refused_without_its_graph(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Branches(Concatenated):
        def forward(self, wide: Tensor, narrow: Tensor, padded: Tensor, features: KeyedJaggedTensor) -> Tensor:
            return super().forward(wide, narrow, padded * 2 if wide.sum() > 0 else padded, features)

    with refused("not_exportable", match="test_pt2.py", error=recfx.ExportError) as raised:
        sample = torch.rand(6, 6), torch.rand(6, 4), torch.rand(6, 5), batch(6)
        recfx.export(recfx.convert(Branches().eval()), tmp_path / "model", sample, format="pt2")
    assert "aten" not in str(raised.value)
    assert "aten" not in capfd.readouterr().err


@pytest.mark.parametrize("quantize", ["fp16", "int8", "int4"])
def test_stored_rows_are_those_of_the_torchscript_file(
    model: nn.Module, quantize: str, usual_export: UsualExport, tmp_path: Path
) -> None:
    of_script = usual_export(False, quantize)
    report = recfx.export(model, tmp_path / "pt2", call(6), quantize=quantize, format="pt2")
    assert report.tables == of_script.tables
    script, loaded = recfx.load(of_script.path), recfx.load(tmp_path / "pt2")
    for batch_size in (0, 1, 7):
        sample = call(batch_size, seed=9)
        assert torch.allclose(loaded(*sample.args), script(*sample.args), rtol=1e-5, atol=1e-6)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.over = collection(4), torch.jit.script(nn.Sequential(nn.Linear(12, 1)))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values())


def test_a_scripted_submodule_is_refused_by_a_code(tmp_path: Path) -> None:
    with refused("not_exportable", error=recfx.ExportError):
        recfx.export(Scripted().eval(), tmp_path / "model", (batch(4),), format="pt2")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_weights_that_a_program_would_round_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    features = batch(3)
    times = KeyedJaggedTensor(features.keys(), features.values(), features.values().to(dtype), features.lengths())
    with refused("not_exportable", error=recfx.ExportError):
        recfx.export(ReadsItsBatch("weights").eval(), tmp_path / "model", (times,), format="pt2")


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        ([20], [[0], [0], [0], [1]], "an id of feature d is out of range for table adopted, whose rows are 0 to 19"),
        ([-1], [[0], [0], [0], [1]], "an id of feature d"),
        ([1], [[2], [-1], [0], [0]], "a length is negative, or greater than the number of ids"),
        ([1, 2], [[1], [0], [0], [0]], "the lengths do not add up"),
    ],
)
def test_the_program_itself_checks_its_batch(
    exported: nn.Module, values: list[int], lengths: Any, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        exported(torch.zeros(1, 1), torch.tensor(values), torch.tensor(lengths))


# Files


def test_the_batch_of_the_sample_and_places_on_this_machine_are_not_in_the_file(
    model: nn.Module, tmp_path: Path
) -> None:
    secret = 7_123_456_789_012_345
    dense, features = call(6).args
    features.values()[0] = secret
    recfx.export(model, tmp_path / "model", (dense, features), format="pt2")
    written = (tmp_path / "model").read_bytes()
    assert secret.to_bytes(8, "little") not in written
    assert str(Path(hashed_models.__file__).parent).encode() not in written  # the model's code is there
    assert b"site-packages" not in written


class ReadsItsBatch(nn.Module):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.ebc = collection(4)
        self.reads = reads

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(features).values()
        if self.reads == "keys":
            return pooled + sum(features[key].lengths().sum() for key in features.keys())  # noqa: SIM118
        if self.reads == "values":
            return pooled + features.values().sum()
        weights = features.weights_or_none()
        return pooled if weights is None else pooled * weights.sum()


def with_more_features(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """With the features in another order, and weights."""
    more = KeyedJaggedTensor(["more"], torch.arange(3), lengths=torch.tensor([1, 0, 2]))
    joined = KeyedJaggedTensor.concat([more, features.permute([2, 0, 1])])
    return KeyedJaggedTensor(joined.keys(), joined.values(), joined.values().float(), lengths=joined.lengths())


@pytest.mark.parametrize("reads", ["keys", "values", "weights"])
def test_a_batch_has_the_features_of_the_sample(reads: str, tmp_path: Path) -> None:
    model = ReadsItsBatch(reads).eval()
    recfx.export(model, tmp_path / "model.pt2", (batch(4),), format="pt2")
    loaded = recfx.load(tmp_path / "model.pt2")
    features = batch(3)
    torch.testing.assert_close(loaded(features), model(features))
    more = with_more_features(features)
    for other in (more, KeyedJaggedTensor(more.keys(), more.values(), lengths=more.lengths())):
        with refused("bad_weights" if other is more else "other_features", error=recfx.InputError):
            loaded(other)
