"""Files of every format that was ever written, with several versions of torch, are loaded and answer as they did."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.checkpoint.directory import FORMAT_VERSION as CHECKPOINT_VERSION
from recfx.exporter.manifest import FORMAT_VERSION
from recfx.kernels.build import library
from tests.exporter.hashed_models import by_name
from tests.files import models
from tests.files.make import EXPORTS, INDEX_ROWS, INDEX_VERSION
from tests.files.stored import DATA, calls_of, facts_in, facts_of, groups, names, unpack
from tests.support.refusals import refused

TORCH = ".".join(torch.__version__.split(".")[:2])
MOST_BYTES = 500_000


def test_there_is_a_file_of_every_format() -> None:
    formats = {(facts["kind"], facts["version"]) for group in groups() for facts in facts_in(group).values()}
    oldest = {"device_own_operators": 2}
    expected = {(kind, number) for kind in EXPORTS for number in range(oldest.get(kind, 1), FORMAT_VERSION + 1)}
    expected |= {("checkpoint", number) for number in range(1, CHECKPOINT_VERSION + 1)}
    assert formats == expected | {("index", number) for number in range(1, INDEX_VERSION + 1)}
    assert sum(path.stat().st_size for path in DATA.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("name", [name for name in names(*EXPORTS) if facts_of(name)["version"] > 1])
def test_an_exported_file_answers_as_it_did(name: str, tmp_path: Path) -> None:
    facts, path = facts_of(name), unpack(name, tmp_path)
    if facts["kind"] == "own_operators" and not library.load():
        pytest.skip("there is no C++ library")
    loaded = recfx.load(path)
    assert loaded.manifest["format_version"] == facts["version"]
    check_answers(loaded, facts["calls"])
    arguments, output = calls_of(facts["calls"])[0]
    torch.testing.assert_close(loaded.serve(by_name(recfx.Sample(*arguments)))["output"], output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in names("checkpoint") if facts_of(name)["version"] == CHECKPOINT_VERSION]
)
def test_training_goes_on_from_a_checkpoint_as_it_did(name: str, tmp_path: Path) -> None:
    facts, path = facts_of(name), unpack(name, tmp_path)
    torch.manual_seed(1)
    model = models.converted(getattr(models, facts["model"])()).eval()
    recfx.load_checkpoint(model, path)
    check_answers(model, facts["calls"])
    models.step(model, 5)
    check_answers(model, facts["calls_after_a_step"])


@pytest.mark.parametrize("name", ["earlier_torch_2.13/checkpoint_1", "earlier_torch_2.13/checkpoint_2"])
def test_a_checkpoint_of_an_earlier_version_is_refused(name: str, tmp_path: Path) -> None:
    with refused("checkpoint_version", error=recfx.CheckpointError):
        recfx.load_checkpoint(models.converted(models.Pooled()), unpack(name, tmp_path))


@pytest.mark.parametrize("name", [name for name in names("index") if facts_of(name)["version"] < 3])
def test_the_state_of_an_index_of_an_earlier_version_is_refused(name: str, tmp_path: Path) -> None:
    index = recfx.HashIndex(INDEX_ROWS, config=recfx.HashConfig(**facts_of(name)["options"]), name="table")
    with refused("torn_state", error=recfx.CheckpointError):
        index.load_state_dict(torch.load(unpack(name, tmp_path), weights_only=True))


@pytest.mark.parametrize("name", [name for name in names("index") if facts_of(name)["version"] > 2])
def test_an_index_gives_ids_the_rows_that_it_gave_them(name: str, tmp_path: Path) -> None:
    facts = facts_of(name)
    index = recfx.HashIndex(INDEX_ROWS, config=recfx.HashConfig(**facts["options"]), name="table")
    index.load_state_dict(torch.load(unpack(name, tmp_path), weights_only=True))
    assert [part.tolist() for part in index.items()] == facts["items"]
    assert {counter: index.counters[counter] for counter in facts["counters"]} == facts["counters"]
    assert index.find(torch.tensor(facts["ids"])).tolist() == facts["rows"]
    assert index.find_or_insert(torch.tensor(facts["inserted"])).tolist() == facts["rows_after_inserting"]


def check_answers(model: nn.Module, answered: list[dict[str, Any]]) -> None:
    for arguments, output in calls_of(answered):
        with torch.no_grad():
            torch.testing.assert_close(model(*arguments), output, rtol=1e-5, atol=1e-6)
