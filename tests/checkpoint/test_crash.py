"""What a writer leaves behind that fails, or that meets what others have left: the old checkpoint or the new one."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import recfx
from recfx.checkpoint import directory as checkpoint_directory
from recfx.checkpoint.directory import Manifest
from tests.checkpoint import killed_writer
from tests.checkpoint.training import OnePart, Training, assert_same
from tests.support.forked_script import run_script
from tests.support.refusals import refused


def test_everything_is_on_the_disk_before_the_switch_and_the_switch_before_the_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL keeps what the system has buffered, a power cut does not: the order of the calls is what matters."""
    training = Training.build()
    training.save(tmp_path)
    old = Manifest.read(tmp_path).data
    calls: list[tuple[str, str]] = []
    fsync, replace, remove = os.fsync, os.replace, checkpoint_directory.shutil.rmtree

    sizes: dict[str, int] = {}

    def note_fsync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("fsync", name))
        sizes[name] = os.fstat(descriptor).st_size
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        calls.append(("replace", Path(target).name))
        replace(source, target)

    def note_remove(path: Path, *args: object, **keywords: object) -> None:
        calls.append(("remove", Path(path).name))
        remove(path)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(checkpoint_directory.shutil, "rmtree", note_remove)
    training.save(tmp_path)
    manifest = Manifest.read(tmp_path)
    switch = calls.index(("replace", "checkpoint.json"))
    synced = {name for call, name in calls[:switch] if call == "fsync"}
    (temporary,) = [name for name in synced if name.startswith("checkpoint.json.")]
    assert synced >= {*manifest.files, manifest.data, temporary, tmp_path.name}
    assert sizes[temporary] == (tmp_path / "checkpoint.json").stat().st_size
    assert {name: sizes[name] for name in manifest.files} == {name: size for name, (size, _) in manifest.files.items()}
    after = calls[switch + 1 :]
    assert after.index(("fsync", tmp_path.name)) < after.index(("remove", old))
    assert ("remove", old) not in calls[:switch]


def test_what_a_writer_leaves_that_cannot_switch_is_deleted_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, second = (Training.build("sgd", rows=40, model_class=OnePart, seed=seed) for seed in (0, 1))
    training.save(tmp_path)
    monkeypatch.setattr(os, "replace", fail)
    with refused("checkpoint_not_written", match="no space left", error=recfx.CheckpointError):
        second.save(tmp_path)
    monkeypatch.undo()
    second.load(tmp_path)
    assert_same(dict(second.model.state_dict()), dict(training.model.state_dict()))
    training.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    training.load(tmp_path)


def sealed(text: str) -> bytes:
    """A manifest of this content, with the right checksum."""
    line = text.encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:5],
        lambda content: content[len(content) // 2 :],
        lambda content: b"",
        lambda content: bytes(len(content)),
        lambda content: b"?" + content[1:],
        lambda content: sealed('{"format": "recfx"}'),
        lambda content: sealed('{"format": "recfx", "version": "two", "data": 7, "files": []}'),
        lambda content: sealed('{"format": "recfx", "version": 1000}'),
    ],
    ids=["half", "beginning", "end", "empty", "zeros", "one_byte", "no_entries", "wrong_entries", "later_version"],
)
def test_a_damaged_checkpoint_can_be_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    """And until the new one is complete, nothing of the old one is deleted."""
    training = Training.build("sgd", rows=40, model_class=OnePart)
    training.save(tmp_path)
    path = tmp_path / "checkpoint.json"
    path.write_bytes(damage(path.read_bytes()))
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(Manifest, "of_folder", fail)
    with pytest.raises(recfx.CheckpointError, match="no space left"):
        training.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    monkeypatch.undo()
    training.save(tmp_path)
    training.load(tmp_path)
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("content", ['{"step": 5}', "step 5\n", "[]", sealed('{"format": "other"}').decode()])
def test_a_manifest_of_somebody_else_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "checkpoint.json").write_text(content)
    (tmp_path / "data-0123456789abcdef").mkdir()
    (tmp_path / "data-0123456789abcdef" / "theirs").write_text("theirs")
    training = Training.build("sgd", rows=40, model_class=OnePart)
    with refused("directory_not_ours", error=recfx.CheckpointError):
        training.save(tmp_path)
    assert (tmp_path / "checkpoint.json").read_text() == content
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.json", "data-0123456789abcdef"]
    (tmp_path / "checkpoint.json").unlink()  # as the error says
    training.save(tmp_path)
    assert (tmp_path / "data-0123456789abcdef" / "theirs").read_text() == "theirs"


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()], ids=["unreadable", "interrupted"])
def test_an_error_after_the_switch_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    training, second = (Training.build("sgd", rows=40, model_class=OnePart, seed=seed) for seed in (0, 1))
    training.save(tmp_path)
    replace = os.replace

    def replace_and_fail(source: Path, target: Path) -> None:
        replace(source, target)
        raise error

    monkeypatch.setattr(os, "replace", replace_and_fail)
    with pytest.raises((recfx.CheckpointError, KeyboardInterrupt)):
        second.save(tmp_path)
    monkeypatch.undo()
    training.load(tmp_path)
    assert_same(dict(training.model.state_dict()), dict(second.model.state_dict()))


def fail(*_: object) -> None:
    raise OSError("no space left")


def test_a_second_writer_is_told_and_so_is_a_reader_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_directory, "_WAIT_SECONDS", 0.0)
    training = Training.build()
    training.save(tmp_path)
    for shared in (True, False):
        with checkpoint_directory.locked(tmp_path, shared), pytest.raises(recfx.CheckpointError) as caught:
            training.save(tmp_path)
        assert caught.value.reason == "checkpoint_busy"
    with checkpoint_directory.locked(tmp_path, shared=True):
        training.load(tmp_path)
    with checkpoint_directory.locked(tmp_path, shared=False), pytest.raises(recfx.CheckpointError) as caught:
        training.load(tmp_path)
    assert caught.value.reason == "checkpoint_busy"


def test_a_killed_writer_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    (tmp_path / "bystander").write_text("untouched")
    result = run_script(Path(killed_writer.__file__), str(directory))
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    versions = [int(version) for _, version, *_ in lines]
    assert len(versions) > 15
    assert (versions, set(versions)) == (sorted(versions), {0, 1})
    assert {len(files) for _, _, *files in lines} == {2}, "the next save cleans up"
    assert (tmp_path / "bystander").read_text() == "untouched"
    assert sorted(os.listdir(directory)) == ["checkpoint.json", Manifest.read(directory).data]
