"""Files of format ``pt2``: the answers and errors of TorchScript files, from a program of ``torch.export``."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.exporter import write_file
from recfx.exporter.compare_outputs import first_difference, run_model
from recfx.exporter.load import LoadedModel
from recfx.exporter.returns import return_pattern, take_apart
from tests.exporter import hashed_models
from tests.exporter.hashed_models import by_name, call, trained
from tests.models import ZOO, Case
from tests.support.forked_script import run_script

IDS = ((-20, 20), (-(2**63), 2**63 - 1), (10_000, 20_000))  # seen in training, extreme, never seen


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


@pytest.fixture(scope="module")
def file(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    recfx.export(model, path, call(6), format="pt2")
    return path


@pytest.fixture(scope="module")
def loaded(file: Path) -> LoadedModel:
    return recfx.load(file)


@pytest.fixture(scope="module")
def program(file: Path) -> nn.Module:
    """What servers have that call it without ``recfx.load``."""
    return torch.export.load(io.BytesIO(file.read_bytes())).module()


@pytest.mark.parametrize("small", [2**16, 16], ids=["filled in memory", "filled in the file"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_the_file_answers_at_any_batch_size(
    is_weighted: bool, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_file, "SMALL", small)
    model = trained(is_weighted)
    report = recfx.export(model, tmp_path / "model", call(6, is_weighted=is_weighted), format="pt2")
    assert report.format == "pt2"
    assert "fbgemm.pruned_hashmap_lookup" in report.graph
    loaded = recfx.load(tmp_path / "model")
    for batch_size in (0, 1, 2, 7):
        for low, high in IDS:
            sample = call(batch_size, seed=9, low=low, high=high, is_weighted=is_weighted)
            assert torch.allclose(loaded(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)
    if is_weighted:
        with pytest.raises(recfx.InputError) as raised:
            loaded(*call(6).args)
        assert raised.value.reason == "missing_weights"


def test_a_sample_of_one(model: nn.Module, tmp_path: Path) -> None:
    recfx.export(model, tmp_path / "model", call(1), format="pt2")
    sample = call(7, seed=9)
    assert torch.allclose(recfx.load(tmp_path / "model")(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)


def test_an_empty_sample_says_nothing_of_a_batch(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(recfx.ExportError, match="size 0 of dense is 0") as raised:
        recfx.export(model, tmp_path / "model", call(0), format="pt2")
    assert raised.value.reason == "not_exportable"


@pytest.mark.parametrize("quantize", ["fp16", "int8", "int4"])
def test_stored_rows_are_those_of_the_torchscript_file(model: nn.Module, quantize: str, tmp_path: Path) -> None:
    of_script = recfx.export(model, tmp_path / "script", call(6), quantize=quantize)
    report = recfx.export(model, tmp_path / "pt2", call(6), quantize=quantize, format="pt2")
    assert report.tables == of_script.tables
    script, loaded = recfx.load(tmp_path / "script"), recfx.load(tmp_path / "pt2")
    for batch_size in (0, 1, 7):
        sample = call(batch_size, seed=9)
        assert torch.allclose(loaded(*sample.args), script(*sample.args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dense", [torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1).long()], ids=str)
def test_plain_tensors_have_the_sizes_and_dtypes_of_the_sample(loaded: LoadedModel, dense: torch.Tensor) -> None:
    with pytest.raises(recfx.InputError) as raised:
        loaded(dense, call(1).args[1])
    assert raised.value.reason == "wrong_argument"


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        ([20], [[0], [0], [0], [1]], "an id of feature d is out of range for table adopted, whose rows are 0 to 19"),
        ([-1], [[0], [0], [0], [1]], "an id of feature d"),
        ([1], [[2], [-1], [0], [0]], "a length is negative, or greater than the number of ids"),
        ([1, 2], [[1], [0], [0], [0]], "the lengths do not add up"),
    ],
)
def test_the_program_itself_checks_its_batch(program: nn.Module, values: list[int], lengths: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        program(torch.zeros(1, 1), torch.tensor(values), torch.tensor(lengths))


def test_plain_tensors_by_name(model: nn.Module, loaded: LoadedModel) -> None:
    sample = call(5, seed=9)
    inputs = by_name(sample)
    assert torch.allclose(loaded.serve(inputs)["output"], model(*sample.args), rtol=1e-5, atol=1e-6)
    for wrong, reason in (
        ({"features.z.values": torch.zeros(1)}, "unknown_input"),
        ({"features.a.lengths": inputs["features.a.lengths"][:-1]}, "bad_lengths"),
    ):
        with pytest.raises(recfx.InputError) as raised:
            loaded.serve(inputs | wrong)
        assert raised.value.reason == reason


def test_a_fresh_process_loads_it_without_the_model(model: nn.Module, file: Path, tmp_path: Path) -> None:
    sample = call(5, seed=9)
    torch.save({**by_name(sample), "wanted": model(*sample.args).detach()}, tmp_path / "batch.pt")
    code = """if True:
        import sys, torch, recfx
        batch = torch.load("batch.pt")
        wanted = batch.pop("wanted")
        assert torch.allclose(recfx.load(sys.argv[1]).serve(batch)["output"], wanted, rtol=1e-5, atol=1e-6)
        assert not [name for name in sys.modules if name.startswith("tests.") and not name.startswith("tests.support")]
    """
    done = run_script(code, str(file), directory=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_loaded_program_stays_in_eval_mode(loaded: LoadedModel) -> None:
    with pytest.raises(recfx.ExportError) as raised:
        loaded.train()
    assert raised.value.reason == "cannot_train"
    assert not loaded.eval()(*call(2).args).requires_grad


# Files


def _with(file: Path, changed: Path, name_end: str, content: bytes) -> Path:
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith(name_end) else old.read(name))
    return changed


def test_files_that_are_not_loaded(file: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    path, whole = tmp_path / "model.pt2", file.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b""):
        path.write_bytes(damaged)
        with pytest.raises(recfx.ExportError) as raised:
            recfx.load(path)
        assert raised.value.reason == "damaged_file"
    later = json.dumps({**loaded.manifest, "format_version": 9}).encode()
    with pytest.raises(recfx.ExportError) as raised:
        recfx.load(_with(file, path, "/extra/recfx.json", later))
    assert raised.value.reason == "newer_format"


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


# Every model of the zoo

REFUSED = {
    # A program would forget what it changes.
    "batch_norm_and_a_counter": "changes buffer 'steps'",
    # Whether they compute something depends on a value in the batch.
    "branches_on_data": "data-dependent",
    "branches_on_data_below_the_root": "data-dependent",
    # They take the batch size for a constant, as KeyedJaggedTensor.from_jt_dict does, or for a key.
    "builds_from_jagged": "specialized",
    "preprocessing": "specialized",
    "preprocessing_collections": "specialized",
    "preprocessing_inline": "specialized",
    "preprocessing_module": "specialized",
    "sparse_nn_negatives": "KeyError",
    "sparse_nn_negatives_with_parameters": "KeyError",
    # Its lengths are one flat tensor, so that no size of the batch is a symbol of its own.
    "builds_its_batch": "does not take every batch",
    # A hook splits the batch's ids by feature, which torch.export takes to be some.
    "hooks": "a batch without ids would fail",
}


@pytest.mark.parametrize("case", [c for c in ZOO if c.name not in REFUSED], ids=lambda case: case.name)
def test_the_file_answers_as_the_model_does(case: Case, tmp_path: Path) -> None:
    with case.around():
        model = recfx.convert(case.model(), case.sample(), verify=False)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        recfx.export(model, tmp_path / "model.pt2", case.sample(), format="pt2")
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        model.eval()
        loaded, compared = recfx.load(tmp_path / "model.pt2"), 0
        for batch_size in (7, 1, 0):
            try:
                sample = case.sample(batch_size)
                wanted = run_model(model, sample)
            except (RuntimeError, IndexError):  # some models cannot be called with an empty batch
                assert batch_size == 0
                continue
            answer = run_model(loaded, sample)
            expected, found = (list(take_apart(return_pattern(value), value).items()) for value in (wanted, answer))
            assert first_difference(expected, found, case.rtol, case.atol) is None, batch_size
            compared += len(expected)
        assert compared


@pytest.mark.parametrize("case", [c for c in ZOO if c.name in REFUSED], ids=lambda case: case.name)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(case: Case, tmp_path: Path) -> None:
    with case.around():
        model = recfx.convert(case.model(), case.sample(), verify=False)
        with pytest.raises(recfx.ExportError, match="not_exportable") as raised:
            recfx.export(model, tmp_path / "model.pt2", case.sample(), format="pt2")
        assert REFUSED[case.name] in str(raised.value)
        assert raised.value.what_to_do
        assert list(tmp_path.iterdir()) == []
        if case.name == "branches_on_data_below_the_root":
            assert raised.value.module_path == "inner"
            assert "handwritten.py:" in str(raised.value)
