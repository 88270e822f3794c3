"""Whatever the files of a checkpoint are, loading runs nothing of theirs, raises one error, and changes nothing."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import recfx
from recfx.checkpoint import load
from tests.checkpoint.crafted import (
    change_index,
    change_settings,
    data_of,
    manifest_of,
    pickles,
    refused,
    replace_settings,
    reseal,
    seal,
    settings_of,
)
from tests.checkpoint.training import OnePart, Training, TwoPart, assert_same, batch

FILES = ("checkpoint.json", ".metadata", "tensors.json", "__0_0.distcp")


def build(seed: int) -> Training:
    return Training.build("adam", rows=40, seed=seed, model_class=OnePart)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    training = build(0)
    training.steps(0, 2)
    training.save(directory)
    return directory


@pytest.fixture
def crafted(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "crafted"))


def trained() -> Training:
    """Another training than the one saved, which holds other ids."""
    training = build(3)
    training.steps(5, 6)
    return training


@pytest.fixture(scope="module")
def target() -> Training:
    """One for all tests: none of them changes it."""
    return trained()


def path_of(directory: Path, name: str) -> Path:
    return directory / name if name == "checkpoint.json" else data_of(directory) / name


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("sealed", [True, False], ids=["right_checksums", "wrong_checksums"])
def test_a_pickle_in_place_of_any_file_runs_nothing(
    crafted: Path, tmp_path: Path, target: Training, file: str, sealed: bool
) -> None:
    marker = tmp_path / "ran"
    path = path_of(crafted, file)
    for content in pickles(marker).values():
        path.write_bytes(content)
        if sealed and file != "checkpoint.json":
            reseal(crafted)
        if sealed and file == ".metadata":
            trained().load(crafted)  # nobody reads it
        else:
            assert refused(target, crafted).reason == "checkpoint_torn"
        assert not marker.exists()


def test_a_pickle_in_front_of_the_elements_runs_nothing(crafted: Path, tmp_path: Path) -> None:
    """Each tensor in a data file is a file of ``torch.save``, pickle and all."""
    marker, path = tmp_path / "ran", path_of(crafted, "__0_0.distcp")
    content = path.read_bytes()
    payload = pickles(marker)["pickle_2"]
    begin, count = 0, 0
    while (begin := content.find(b"\x80\x02ctorch._utils", begin)) >= 0:
        content = content[:begin] + payload + content[begin + len(payload) :]
        begin, count = begin + len(payload), count + 1
    assert count > 10
    path.write_bytes(content)
    reseal(crafted)
    training = build(3)
    training.load(crafted)
    assert not marker.exists()


def test_a_pickle_as_settings_runs_nothing(crafted: Path, tmp_path: Path, target: Training) -> None:
    for content in pickles(tmp_path / "ran").values():
        replace_settings(crafted, content)
        assert refused(target, crafted).reason == "checkpoint_torn"
        assert not (tmp_path / "ran").exists()


def test_neither_loading_nor_saving_unpickles(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = build(3)

    def fail(*_: Any, **__: Any) -> Any:
        pytest.fail("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, fail)
    training.load(saved)
    training.save(tmp_path)


OTHER_SHAPES: list[Any] = [None, True, 0, -1, 2**63, 1e308, "", "x", [], {}, [[]], {"a": 1}, [None] * 3, {"": {}}]


def write(directory: Path, file: str, content: bytes) -> None:
    """Write a file, or the settings."""
    if file == "settings":
        return replace_settings(directory, content)
    path_of(directory, file).write_bytes(content)
    return reseal(directory) if file != "checkpoint.json" else None


@pytest.mark.parametrize("file", ["checkpoint.json", "tensors.json", "settings"])
def test_json_of_other_shapes(crafted: Path, target: Training, file: str) -> None:
    contents = [json.dumps(value).encode() for value in OTHER_SHAPES]
    contents += [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"1" * 10_000, b"NaN"]
    for content in contents:
        write(crafted, file, content)
        assert refused(target, crafted).reason == "checkpoint_torn"
        if file == "checkpoint.json":
            try:
                seal(crafted, json.loads(content))
            except (ValueError, RecursionError):
                continue
            assert refused(target, crafted).reason == "checkpoint_torn"


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree of dicts and lists."""
    places: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        places += [(value, key), *nodes(child)]
    return places


def changed(value: Any, generator: random.Random) -> Any:
    """A copy with one place changed, emptied, or filled with what is at another."""
    value = copy.deepcopy(value)
    places = nodes(value)
    parent, key = generator.choice(places)
    source, source_key = generator.choice(places)
    choice = generator.randrange(5)
    if choice == 0:
        del parent[key]
    elif choice == 1:
        parent[key] = copy.deepcopy(source[source_key])
    elif choice == 2 and type(parent[key]) is int:
        parent[key] += generator.choice([-1, 1, 4, -4, 2**20, 2**62, -(2**63)])
    elif choice == 3 and isinstance(parent, dict):
        parent[generator.choice(["", "params", "../x", "\ud800", str(source_key)])] = parent.pop(key)
    else:
        parent[key] = generator.choice(OTHER_SHAPES)
    return value


@pytest.mark.parametrize("file", ["checkpoint.json", "tensors.json", "settings"])
def test_json_with_one_place_changed_is_refused_or_harmless(saved: Path, tmp_path: Path, file: str) -> None:
    """What is still a checkpoint loads: other numbers, say. Then the model can be used."""
    directory = Path(shutil.copytree(saved, tmp_path / "crafted"))
    generator, outcomes = random.Random(0), {"refused": 0, "loaded": 0}
    original = {
        "checkpoint.json": manifest_of(directory),
        "tensors.json": json.loads(path_of(directory, "tensors.json").read_bytes()),
        "settings": settings_of(directory),
    }[file]
    training = trained()
    before = training.everything()
    for _ in range(300):
        mutated = changed(original, generator)
        if file == "checkpoint.json":
            seal(directory, mutated)
        else:
            write(directory, file, json.dumps(mutated).encode())
        try:
            training.load(directory)
        except recfx.CheckpointError:
            assert_same(training.everything(), before)
            outcomes["refused"] += 1
        else:
            training.model(batch(0)).sum().backward()
            training = trained()
            before = training.everything()  # slots are placed by a seed that each index draws
            outcomes["loaded"] += 1
    assert outcomes["refused"] > 100, outcomes


@pytest.mark.parametrize("file", FILES)
def test_what_is_no_regular_file(crafted: Path, tmp_path: Path, target: Training, file: str) -> None:
    path = path_of(crafted, file)
    aside = tmp_path / "aside"
    path.rename(aside)
    for make in (
        lambda: path.symlink_to(aside),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path),
        lambda: path.mkdir(),
        lambda: os.mkfifo(path),
    ):
        make()
        assert refused(target, crafted).reason == "checkpoint_torn"
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_data_folder_that_is_none(crafted: Path, tmp_path: Path, target: Training) -> None:
    data = data_of(crafted)
    data.rename(tmp_path / "aside")
    for make in (
        lambda: None,
        lambda: data.symlink_to(tmp_path / "aside"),
        lambda: data.write_text("a file"),
        lambda: os.mkfifo(data),
    ):
        make()
        assert refused(target, crafted).reason == "checkpoint_torn"
        data.unlink(missing_ok=True)
    manifest = manifest_of(crafted)
    for name in ("../aside", str(tmp_path / "aside"), ".", "", "data-0123456789abcdef/../../aside"):
        seal(crafted, {**manifest, "data": name})
        assert refused(target, crafted).reason == "checkpoint_torn"


@pytest.mark.parametrize("name", ["../../secret", "/dev/zero", "..", ".", "", "a/b", "a\0b", "\ud800", "x" * 300])
def test_files_outside_of_the_folder_are_not_read(crafted: Path, target: Training, name: str) -> None:
    def change(index: Any) -> None:
        for tensor in index["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk[2] = name

    manifest = manifest_of(crafted)
    (crafted.parent / "secret").write_bytes(path_of(crafted, "__0_0.distcp").read_bytes())
    change_index(crafted, change)
    assert refused(target, crafted).reason == "checkpoint_torn"
    manifest["files"][name] = manifest["files"].pop("__0_0.distcp")
    seal(crafted, manifest)
    assert refused(target, crafted).reason == "checkpoint_torn"


def test_files_swapped_with_each_other(crafted: Path, target: Training) -> None:
    contents = {name: path_of(crafted, name).read_bytes() for name in FILES}
    for one in FILES:
        for two in FILES[FILES.index(one) + 1 :]:
            paths = path_of(crafted, one), path_of(crafted, two)
            for name, path in zip((two, one), paths, strict=True):
                path.write_bytes(contents[name])
            assert refused(target, crafted).reason == "checkpoint_torn"
            if one != "checkpoint.json":
                reseal(crafted)
                assert refused(target, crafted).reason == "checkpoint_torn"
            for name, path in zip((one, two), paths, strict=True):
                path.write_bytes(contents[name])
            if one != "checkpoint.json":
                reseal(crafted)


def test_truncated_files_with_right_checksums(crafted: Path, target: Training) -> None:
    for name in FILES[2:]:
        path = path_of(crafted, name)
        content = path.read_bytes()
        for length in [0, 1, *range(2, len(content), max(1, len(content) // 40)), len(content) - 1]:
            path.write_bytes(content[:length])
            reseal(crafted)
            if name == "tensors.json" or length < len(content) - 2000:  # behind the last element nothing is read
                assert refused(target, crafted).reason == "checkpoint_torn"
        path.write_bytes(content)


@pytest.mark.parametrize("file", FILES[1:])
def test_files_of_another_checkpoint(crafted: Path, tmp_path: Path, target: Training, file: str) -> None:
    unrelated = Training.build("adagrad", rows=80, seed=1, model_class=TwoPart)
    unrelated.steps(0, 1)
    unrelated.save(tmp_path / "other")
    shutil.copy(path_of(tmp_path / "other", file), path_of(crafted, file))
    assert refused(target, crafted).reason == "checkpoint_torn"
    reseal(crafted)
    if file != ".metadata":
        refused(target, crafted)


@pytest.mark.parametrize(
    "change",
    [
        {"size": [2**60, 4]},
        {"size": [2**60, 4], "chunks": [[[0, 0], [2**60, 4], "__0_0.distcp", 0]]},
        {"size": [2**31, 2**31, 2**31]},
        {"size": [0, 2**62, 2**62], "chunks": []},
        {"size": [40, 4], "chunks": []},
        {"size": [40, 4], "chunks": [[[0, 0], [39, 4], "__0_0.distcp", 0]]},
        {"size": [40, 4], "chunks": [[[0, 0], [40, 2], "__0_0.distcp", 0]] * 2},
        {"size": [40, 4], "chunks": [[[0, 0], [40, 4], "__0_0.distcp", -8]]},
        {"size": [40, 4], "chunks": [[[0, 0], [40, 4], "__0_0.distcp", 10**9]]},
        {"size": [40, 4], "chunks": [[[0, 0], [40, 4], "__0_0.distcp", 0]], "dtype": "getattr"},
        {"size": [40, 4], "chunks": [[[0, 0], [40, 4], "__0_0.distcp", 0]], "dtype": "quint8"},
        {"size": [40, 4], "chunks": [[[-1, 0], [41, 4], "__0_0.distcp", 0]]},
        {"size": [40, 4], "chunks": [[[True, 0], [39, 4], "__0_0.distcp", 0]]},
        {"size": [1] * 100, "chunks": [[[0] * 100, [1] * 100, "__0_0.distcp", 0]]},
    ],
)
def test_tensors_that_cannot_be(crafted: Path, target: Training, change: dict[str, Any]) -> None:
    name = "model.first.embedding_bags.a.weight"
    change_index(crafted, lambda index: index["tensors"][name].update(change))
    assert refused(target, crafted).reason == "checkpoint_torn"


def test_two_tensors_at_one_place(crafted: Path, target: Training) -> None:
    def change(index: dict[str, Any]) -> None:
        states = [index["tensors"][f"in_backward.first.embedding_bags.a.weight.exp_avg{end}"] for end in ("", "_sq")]
        states[0]["chunks"] = states[1]["chunks"]

    change_index(crafted, change)
    assert "two tensors are at the same place" in refused(target, crafted).message


class Strict(OnePart):
    """Takes its extra state by code of its own, which refuses most of what it is given."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = -1
        self.calls = state["calls"] + 0


def test_an_extra_state_that_its_module_refuses(tmp_path: Path) -> None:
    source, target = (Training.build("adam", rows=40, seed=seed, model_class=Strict) for seed in (0, 1))
    source.steps(0, 1)
    target.steps(3, 4)
    target.model.calls = 7
    source.save(tmp_path)
    change_settings(tmp_path, lambda settings: settings["extra_state"].update(_extra_state={"calls": "many"}))
    error = refused(target, tmp_path)
    assert error.reason == "checkpoint_mismatch"
    assert "the Strict does not accept what was saved (TypeError" in error.message
    assert target.model.calls == 7


def test_a_folder_that_is_swapped_while_it_is_read(
    saved: Path, crafted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was checked is what is read, whatever has its name by then."""
    plan, data = load._plan, data_of(crafted)

    def swap_and_plan(*arguments: Any) -> Any:
        data.rename(tmp_path / "aside")
        shutil.copytree(tmp_path / "aside", data)
        for path in data.iterdir():
            path.write_bytes(b"\0" * path.stat().st_size)
        return plan(*arguments)

    monkeypatch.setattr(load, "_plan", swap_and_plan)
    loaded, expected = build(3), build(4)
    loaded.load(crafted)
    monkeypatch.undo()
    expected.load(saved)
    assert_same(dict(loaded.model.state_dict()), dict(expected.model.state_dict()))


def test_a_file_that_is_changed_while_it_is_read(
    crafted: Path, target: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = load._plan, path_of(crafted, "__0_0.distcp")

    def change_and_plan(*arguments: Any) -> Any:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return plan(*arguments)

    monkeypatch.setattr(load, "_plan", change_and_plan)
    error = refused(target, crafted)
    assert error.reason == "checkpoint_unreadable"
    assert "was changed while it was read. Nothing was loaded." in error.message
