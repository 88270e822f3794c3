"""Deltas: a base to which they are applied is the file that would have been exported then, bit for bit."""

from __future__ import annotations

import copy
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.exporter.hashed_models import (
    FORMATS,
    HASHING,
    IDS,
    HashedModel,
    RecurrentModel,
    SequenceModel,
    call,
    trained,
)

OPTIONS = {name: options for name, options in FORMATS.items() if name != "pt2"}
MIXED = {"shared_by_two": "int8", "some_dense": "int4", "mean": "fp16"}


def step(model: nn.Module, seed: int, *, low: int = -20, high: int = 20) -> None:
    """One step of the tables, with new ids among those of the batch, and of everything else."""
    model.train()
    sample = call(12, seed=seed, low=low, high=high)
    model(*sample.args).pow(2).sum().backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embedding" not in name and parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    model.eval()


def erase(model: nn.Module) -> None:
    collection: Any = next(module for module in model.modules() if hasattr(module, "hash_indexes"))
    for index in collection.hash_indexes.values():
        index.erase(index.items()[0][:5])


def load_older(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(state)


def assert_same(loaded: recfx.LoadedModel, expected: recfx.LoadedModel) -> None:
    """Every tensor of the two programs is the same, and so are answers for ids old, extreme and never seen."""
    actual, others = (
        {**dict(program.named_buffers()), **dict(program.named_parameters())}
        for program in (loaded.script.program.program, expected.script.program.program)
    )
    assert actual.keys() == others.keys()
    for name, tensor in actual.items():
        assert torch.equal(as_bytes(tensor), as_bytes(others[name])), name
    assert loaded.manifest["collections"] == expected.manifest["collections"]
    assert loaded.manifest["state"]["attributes"] == expected.manifest["state"]["attributes"]
    for low, high in IDS:
        sample = call(9, seed=7, low=low, high=high)
        assert torch.equal(loaded(*sample.args), expected(*sample.args))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("is_tracked", [False, True])
@pytest.mark.parametrize(
    ("kind", "quantize", "model_class"),
    [
        ("torchscript", None, HashedModel),
        ("torchscript", MIXED, HashedModel),
        ("with recfx's operators", "int8", HashedModel),
        ("for a device", "int4", HashedModel),
        ("with recfx's operators", None, SequenceModel),
        ("torchscript", None, RecurrentModel),
    ],
)
def test_base_and_deltas_are_a_whole_export(
    kind: str, quantize: Any, model_class: type[nn.Module], is_tracked: bool, tmp_path: Path
) -> None:
    options = {**OPTIONS[kind], "quantize": quantize}
    model, sample = trained(model=model_class), call(6)
    if is_tracked:
        recfx.track_changes(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recfx.export(model, tmp_path / "base.pt", sample, **options)
    loaded, last = recfx.load(tmp_path / "base.pt"), tmp_path / "base.pt"
    histories: list[list[Callable[[], None]]] = [
        [lambda: step(model, 11), lambda: step(model, 12)],
        [lambda: load_older(model, before), lambda: step(model, 14)],
        [],
        [lambda: erase(model), lambda: step(model, 13, low=15, high=25)],
    ]
    for number, history in enumerate(histories):
        for action in history:
            action()
        if isinstance(model, RecurrentModel):
            model.scaled.low = model.scaled.low + 1
        path = tmp_path / f"{number}.delta"
        report = recfx.export_delta(model, path, base=last)
        assert report.number == number + 1
        assert bool(history) == any(table.rows for table in report.tables)
        last = path
        loaded.apply(path)
    recfx.export(model, tmp_path / "whole.pt", sample, **options)
    assert_same(loaded, recfx.load(tmp_path / "whole.pt"))
    recfx.merge_deltas(tmp_path / "base.pt", [tmp_path / f"{number}.delta" for number in range(4)], tmp_path / "merged")
    assert_same(recfx.load(tmp_path / "merged"), loaded)


def test_a_trainer_that_was_restarted_goes_on_with_the_chain(tmp_path: Path) -> None:
    model, sample = trained(), call(6)
    recfx.track_changes(model)
    recfx.export(model, tmp_path / "base.pt", sample)
    step(model, 21)
    recfx.export_delta(model, tmp_path / "1", base=tmp_path / "base.pt")
    step(model, 22)
    recfx.save_checkpoint(model, tmp_path / "run")
    again = recfx.convert(HashedModel(), hashing=HASHING)
    recfx.load_checkpoint(again, tmp_path / "run", in_backward=False)
    recfx.export_delta(again, tmp_path / "2", base=tmp_path / "1")
    recfx.export(model, tmp_path / "whole.pt", sample)
    loaded = recfx.load(tmp_path / "base.pt").apply(tmp_path / "1").apply(tmp_path / "2")
    assert_same(loaded, recfx.load(tmp_path / "whole.pt"))


def test_a_tracked_model_needs_no_file_that_it_remembers(tmp_path: Path) -> None:
    """It remembers four versions; of others, and of a model that is not tracked, the files are read."""
    model = trained()
    with pytest.raises(recfx.ExportError, match="not_converted"):
        recfx.track_changes(nn.Linear(1, 1))
    recfx.track_changes(model)
    recfx.export(model, tmp_path / "0", call(6))
    shutil.copy(tmp_path / "0", tmp_path / "kept")
    for number in range(1, 5):
        step(model, 40 + number)
        recfx.export_delta(model, tmp_path / f"{number}", base=tmp_path / f"{number - 1}")
        (tmp_path / "0").unlink(missing_ok=True)
    recfx.export_delta(model, tmp_path / "of_0", base=tmp_path / "kept")  # which is read
    with pytest.raises(recfx.ExportError, match="base_unknown"):
        recfx.export_delta(copy.deepcopy(model), tmp_path / "again", base=tmp_path / "4")
    recfx.merge_deltas(tmp_path / "kept", [tmp_path / f"{number}" for number in range(1, 5)], tmp_path / "merged")
    recfx.merge_deltas(tmp_path / "kept", tmp_path / "of_0", tmp_path / "at_once")
    recfx.export(model, tmp_path / "whole", call(6))
    for name in ("merged", "at_once"):
        assert_same(recfx.load(tmp_path / name), recfx.load(tmp_path / "whole"))


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, three deltas after it, and the base and a delta of another chain."""
    folder = tmp_path_factory.mktemp("chain")
    model, other = trained(), trained()
    for name, exported in (("base", model), ("other", other)):
        recfx.export(exported, folder / name, call(6))
    recfx.export(model, folder / "pt2", call(6), format="pt2")
    step(other, 30)
    recfx.export_delta(other, folder / "of_other", base=folder / "other")
    for number, last in enumerate(["base", "1", "2"], 1):
        step(model, 30 + number)
        recfx.export_delta(model, folder / f"{number}", base=folder / last)
    damaged = bytearray((folder / "2").read_bytes())
    for position in range(len(damaged) // 4, len(damaged) // 2, 7):  # a byte between records would not be missed
        damaged[position] ^= 1
    (folder / "damaged").write_bytes(damaged)
    (folder / "cut").write_bytes((folder / "2").read_bytes()[:-200])
    return folder


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("1", "delta_out_of_order"),
        ("3", "delta_out_of_order"),
        ("of_other", "delta_of_other_base"),
        ("damaged", "damaged_file"),
        ("cut", "damaged_file"),
        ("base", "not_a_delta"),
        ("nothing", "no_file"),
    ],
)
def test_what_does_not_follow_changes_nothing(name: str, reason: str, chain: Path) -> None:
    loaded, sample = recfx.load(chain / "base").apply(chain / "1"), call(9)
    before, manifest = loaded(*sample.args), loaded.manifest
    with pytest.raises(recfx.ExportError) as error:
        loaded.apply(chain / name)
    assert error.value.reason == reason
    assert torch.equal(loaded(*sample.args), before)
    assert loaded.manifest == manifest
    loaded.apply(chain / "2").apply(chain / "3")


def test_a_delta_is_no_file_to_load(chain: Path) -> None:
    with pytest.raises(recfx.ExportError, match="is_a_delta"):
        recfx.load(chain / "1")


def test_bases_that_no_delta_can_follow(chain: Path, tmp_path: Path) -> None:
    model = trained()
    shutil.copy(chain / "1", tmp_path / "alone")
    for base in (chain / "pt2", chain / "cut", tmp_path / "alone", tmp_path / "nothing"):
        with pytest.raises(recfx.ExportError, match="base_unknown"):
            recfx.export_delta(model, tmp_path / "delta", base=base)
    other = recfx.convert(HashedModel(), hashing={**HASHING, "mean": recfx.HashConfig(dense_rows=0, rows=128)})
    with pytest.raises(recfx.ExportError, match=r"delta_does_not_fit.*'mean'.*rows"):
        recfx.export_delta(other, tmp_path / "delta", base=chain / "base")
    with pytest.raises(recfx.ExportError, match="model_on_meta"):
        recfx.export_delta(model.to("meta"), tmp_path / "delta", base=chain / "base")
    assert not (tmp_path / "delta").exists()


class WithConstant(HashedModel):
    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return super().forward(dense, features) * torch.tensor([1.0, 2.0])


class WithList(RecurrentModel):
    def __init__(self) -> None:
        super().__init__()
        self.scaled.factors = [torch.ones(29)]


@pytest.mark.parametrize("model_class", [WithConstant, WithList])
def test_a_constant_that_the_model_does_not_have_is_not_followed(model_class: type[nn.Module], tmp_path: Path) -> None:
    model = trained(model=model_class)
    recfx.export(model, tmp_path / "base", call(6))
    with pytest.raises(recfx.ExportError, match="not_followed"):
        recfx.export_delta(model, tmp_path / "delta", base=tmp_path / "base")


class WithNumber(HashedModel):
    temperature, steps = 1.0, 0

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return super().forward(dense, features) / ((1 + self.steps) if self.training else self.temperature)


def test_a_number_that_the_program_has_for_ever(tmp_path: Path) -> None:
    model: Any = trained(model=WithNumber)
    recfx.export(model, tmp_path / "base", call(6))
    model.steps = 7
    recfx.export_delta(model, tmp_path / "delta", base=tmp_path / "base")
    model.temperature = 0.5
    with pytest.raises(recfx.ExportError, match=r"delta_does_not_fit.* temperature = 0.5, and 1.0 in the base"):
        recfx.export_delta(model, tmp_path / "delta", base=tmp_path / "base")


def test_files_that_were_replaced(chain: Path, tmp_path: Path) -> None:
    """A base that has become one with the first deltas still serves; deltas in each other's place do not."""
    for name in ("base", "1", "2", "3"):
        shutil.copy(chain / name, tmp_path)
    model = trained()
    recfx.merge_deltas(tmp_path / "base", str(tmp_path / "1"), tmp_path / "base")
    recfx.merge_deltas(tmp_path / "base", [tmp_path / "2"], tmp_path / "base")
    recfx.export_delta(model, tmp_path / "4", base=tmp_path / "3")
    merged = recfx.load(tmp_path / "base").apply(tmp_path / "3").apply(tmp_path / "4")
    recfx.export(model, tmp_path / "whole.pt", call(6))
    assert_same(merged, recfx.load(tmp_path / "whole.pt"))
    recfx.export_delta(model, tmp_path / "3", base=tmp_path / "4")
    with pytest.raises(recfx.ExportError, match=r"base_unknown.*has been replaced"):
        recfx.export_delta(model, tmp_path / "5", base=tmp_path / "4")


def test_requests_are_answered_by_one_version(chain: Path) -> None:
    """Threads that call the model while deltas are applied get the answers of one version each."""
    sample = call(9)
    loaded = recfx.load(chain / "base")
    allowed = [recfx.load(chain / "base")(*sample.args)]
    for count in (1, 2, 3):
        version = recfx.load(chain / "base")
        for number in range(count):
            version.apply(chain / f"{number + 1}")
        allowed.append(version(*sample.args))
    answers, done = list[torch.Tensor](), threading.Event()

    def ask() -> None:
        while not done.is_set():
            answers.append(loaded(*sample.args))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in (1, 2, 3):
        loaded.apply(chain / f"{number}")
    done.set()
    for thread in threads:
        thread.join()
    assert all(any(torch.equal(answer, version) for version in allowed) for answer in answers)
    assert torch.equal(loaded(*sample.args), allowed[3])
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(allowed))
