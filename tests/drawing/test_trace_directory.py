"""RECFX_TRACE: what is written, what is not, and that conversions do not get in each other's way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import struct
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

import recfx
from recfx import HashConfig
from recfx.inspect.drawing import trace_directory
from recfx.inspect.drawing.trace_directory import TraceWarning
from tests.inspect.balanced import Balanced
from tests.inspect.models import Wrapped, batch, collection, dlrm
from tests.sharding.cases import Case, Model, Table, build, plan_of
from tests.sharding.ranks import ranks
from tests.support.forked_script import run_script

RAW = HashConfig(dense_rows=0)
PASSES = [pass_.name for pass_ in recfx.passes()]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    monkeypatch.setenv("RECFX_TRACE", str(path))
    return path


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_pass_the_report_and_the_times_are_written(directory: Path) -> None:
    model, sample = dlrm()
    converted = recfx.convert(model, sample, hashing=RAW)
    folder = directory / "001-DLRM"
    texts = {f"passes/{number:02d}-{name}.txt" for number, name in enumerate(["before", *PASSES])}
    changed = [record.name for record in converted.sparse_arch.embedding_bag_collection.pass_records if record.modified]
    diffs = {f"passes/{1 + PASSES.index(name):02d}-{name}.diff" for name in changed}
    reports = {"report.txt", "report.html", "report.json"}
    always = {"graph.html", "timings.json", "versions.json", "index.html"}
    assert names(folder) == texts | diffs | reports | always
    assert "# sparse_arch.embedding_bag_collection\nfeatures = input\n" in (folder / "passes/00-before.txt").read_text()
    last = (folder / f"passes/{len(PASSES):02d}-lower.txt").read_text()
    assert "hash_lookup(" in last
    assert "bytes=8*B*(L_f0 + L_f1) by=expand_collection" in last
    assert (
        "+++ sparse_arch.embedding_bag_collection after fuse_hash_lookup"
        in (folder / f"passes/{1 + PASSES.index('fuse_hash_lookup'):02d}-fuse_hash_lookup.diff").read_text()
    )
    assert "1 converted" in (folder / "report.txt").read_text()
    assert '<a href="graph.html#node=' in (folder / "report.html").read_text()
    assert json.loads((folder / "report.json").read_text())["ok"] is True
    times = json.loads((folder / "timings.json").read_text())
    stages = ["discover", "replace, and run the passes", "verify", "place, and patch"]
    assert list(times["stages"]) == stages
    assert list(times["passes"]["sparse_arch.embedding_bag_collection"]) == PASSES
    assert all(seconds >= 0 for seconds in times["stages"].values())
    assert json.loads((folder / "versions.json").read_text())["torch"] == torch.__version__


def test_index_pages_link_to_everything(directory: Path) -> None:
    recfx.convert(Wrapped(collection()))
    recfx.convert(Wrapped(collection()))
    page = Balanced()
    page.feed((directory / "index.html").read_text())
    assert page.open == []
    links = re.findall(r'href="([^"]+)"', (directory / "index.html").read_text())
    assert links == ["001-Wrapped/index.html", "002-Wrapped/index.html"]
    for link in links:
        folder = (directory / link).parent
        page = Balanced()
        page.feed((directory / link).read_text())
        assert page.open == []
        linked = set(re.findall(r'href="([^"]+)"', (directory / link).read_text()))
        assert linked == names(folder) - {"index.html"}


def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECFX_TRACE", "")
    monkeypatch.chdir(tmp_path)
    recfx.convert(Wrapped(collection()))
    assert list(tmp_path.iterdir()) == []


def test_there_are_no_weights_and_no_ids_in_it(directory: Path) -> None:
    model, secret_ids = Wrapped(collection()), [7077177, -123123123, 99099099, 31337313]
    weights = [0.43218765, 0.87651234]
    with torch.no_grad():
        for bag, value in zip(model.inner.embedding_bags.values(), weights, strict=True):
            bag.weight.fill_(value)
    converted = recfx.convert(model, hashing=RAW)
    converted(batch(secret_ids))
    recfx.convert(converted, (batch(secret_ids),), hashing=RAW, whole_graph=True)  # ids are in the indexes now
    with pytest.raises(recfx.ConversionError):
        recfx.convert(Wrapped(collection()), (batch(secret_ids),))  # they are out of range, which the error says
    contents = b"\n".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    for secret in secret_ids:
        assert str(abs(secret)).encode() not in contents
        assert f"{abs(secret):,}".encode() not in contents
        assert struct.pack("<q", secret) not in contents
    for value in weights:
        assert str(value)[:7].encode() not in contents
        assert struct.pack("<f", value) not in contents
    assert {path.name for path in directory.iterdir()} == {"index.html", "001-Wrapped", "002-Wrapped", "003-Wrapped"}


class Quotes(Wrapped):
    """In eval mode, or always, it fails and quotes the ids that it was given."""

    def __init__(self, inner: nn.Module, always: bool) -> None:
        super().__init__(inner)
        self.always = always

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.always or not self.training:
            ids = features.values()
            raise ValueError(f"cannot run with\n{ids if isinstance(ids, fx.Proxy) else ids.tolist()}")
        return super().forward(features)


@pytest.mark.parametrize("always", [True, False])
def test_what_the_model_says_of_a_batch_is_left_out(always: bool, directory: Path) -> None:
    sample = (batch([7077177, 1, 2, 3]),)
    model = Quotes(collection(rows=8_000_000, dim=1), always)
    if always:
        with pytest.raises(recfx.ConversionError, match="7077177"):
            recfx.convert(model, sample)
        where = "error.txt"
    else:
        assert "7077177" in recfx.explain(recfx.convert(model, sample)).verification.text
        where = "report.json"
    text = (directory / "001-Quotes" / where).read_text()
    assert "raises ValueError (what it says is left out here" in text
    assert not [path for path in directory.rglob("*") if path.is_file() and b"7077177" in path.read_bytes()]


class Remaps(Wrapped):
    """Its ids are those of a table that is not saved."""

    def __init__(self, inner: nn.Module, ids: list[int]) -> None:
        super().__init__(inner)
        self.register_buffer("remap", torch.tensor(ids), persistent=False)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        ids = self.remap[features.values() % 2]
        return super().forward(KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths()))


@pytest.mark.parametrize(("ids", "hashing"), [([3, 7077177], RAW), ([41, 97], HashConfig(dense_rows=98, rows=100))])
def test_ids_that_prove_a_range_are_left_out(ids: list[int], hashing: HashConfig, directory: Path) -> None:
    converted = recfx.convert(Remaps(collection(), ids), (batch([1, 2, 3, 4]),), hashing=hashing, verify=False)
    assert f"ids are {ids[0]} to {ids[1]}" in recfx.explain(converted).to_json()
    contents = {path.name: path.read_text() for path in directory.rglob("*") if path.is_file()}
    assert not [name for name, text in contents.items() if f"{ids[0]} to {ids[1]}" in text]
    assert "ids are in a range (left out here: its borders are ids)" in contents["report.json"]
    assert "values of remap" in contents["report.json"]


def test_a_conversion_that_fails_says_why(directory: Path) -> None:
    with pytest.raises(recfx.ConversionError):
        recfx.convert(Wrapped(collection()), hashing={"nobody": RAW})
    folder = directory / "001-Wrapped"
    assert names(folder) == {"error.txt", "timings.json", "versions.json", "index.html"}
    text = (folder / "error.txt").read_text()
    assert text.startswith("ConversionError: [unknown_table] hashing names 'nobody', which no collection has.")
    assert "replace_collections.py" in text
    assert "failed: ConversionError (unknown_table)" in (folder / "index.html").read_text()


def test_a_model_that_is_a_whole_graph(directory: Path) -> None:
    model, sample = dlrm()
    recfx.convert(model, sample, whole_graph=True, verify=False)
    folder = directory / "001-DLRM"
    assert "inter_arch" in (folder / "train_graph.txt").read_text()
    assert "by=expand_collection" in (folder / "eval_graph.txt").read_text()
    assert "make a whole graph" in json.loads((folder / "timings.json").read_text())["stages"]


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("RECFX_TRACE", str(tmp_path / "file"))
    with pytest.warns(TraceWarning, match=r"RECFX_TRACE=.*file cannot be written .*: nothing is traced"):
        converted = recfx.convert(Wrapped(collection()))
    assert recfx.explain(converted).ok
    assert (tmp_path / "file").read_text() == "not a directory"


def test_a_directory_below_the_home_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RECFX_TRACE", "~/traces")
    recfx.convert(Wrapped(collection()))
    assert (tmp_path / "traces" / "001-Wrapped" / "index.html").is_file()
    monkeypatch.setenv("RECFX_TRACE", "~no_such_user_here/traces")
    with pytest.warns(TraceWarning, match="cannot be written .*: nothing is traced"):
        recfx.convert(Wrapped(collection()))


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """The kernel writes no more than so many bytes to a file, as on a disk that fills up while it is written.

    It holds for pytest's own output as well, so it must end before the test does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("size", "written"), [(10, set()), (5_000, {"report.txt"})])
def test_a_disk_that_fills_up_does_not_lose_the_conversion(size: int, written: set[str], directory: Path) -> None:
    recfx.convert(Wrapped(collection()))
    listed = (directory / "index.html").read_text()
    with room_for(size), pytest.warns(TraceWarning, match="is not complete: .*File too large"):
        converted = recfx.convert(Wrapped(collection()))
    assert recfx.explain(converted).ok
    assert names(directory / "002-Wrapped") == written  # nothing that is half written
    assert (directory / "index.html").read_text() == listed
    with room_for(10), pytest.warns(TraceWarning, match="is not complete"), pytest.raises(recfx.ConversionError):
        recfx.convert(Wrapped(collection()), hashing={"nobody": RAW})
    assert {path.name for path in directory.iterdir()} == {"index.html", "001-Wrapped", "002-Wrapped", "003-Wrapped"}


def test_only_folders_that_are_finished_are_listed_in_order(directory: Path) -> None:
    for name in ("1000-Wrapped", "002-Other", "reports"):
        (directory / name).mkdir(parents=True)
        (directory / name / "index.html").touch()
    (directory / "003-Stopped").mkdir()
    recfx.convert(Wrapped(collection()))
    links = re.findall(r'href="([^/]+)/index.html"', (directory / "index.html").read_text())
    assert links == ["001-Wrapped", "002-Other", "1000-Wrapped"]


def test_a_page_of_someone_else_stays_as_it_is(directory: Path) -> None:
    directory.mkdir()
    (directory / "index.html").write_text("<h1>My site</h1>")
    with pytest.warns(TraceWarning, match=r"index.html is not a page of RECFX_TRACE, so it stays as it is"):
        recfx.convert(Wrapped(collection()))
    assert (directory / "index.html").read_text() == "<h1>My site</h1>"
    assert (directory / "001-Wrapped" / "index.html").is_file()
    (directory / "index.html").unlink()
    (directory / "index.html").symlink_to("/dev/zero")  # which has no end
    with pytest.warns(TraceWarning, match=r"index.html is not a page of RECFX_TRACE"):
        recfx.convert(Wrapped(collection()))


def test_whoever_writes_the_list_last_has_seen_all(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = trace_directory.index_of_all

    def slow(folders: list[str]) -> str:
        if len(folders) == 1:  # another conversion ends before this one writes
            (directory / "002-Other").mkdir(exist_ok=True)
            (directory / "002-Other" / "index.html").touch()
        return stock(folders)

    monkeypatch.setattr(trace_directory, "index_of_all", slow)
    recfx.convert(Wrapped(collection()))
    assert "002-Other" in (directory / "index.html").read_text()


class Wanders(Wrapped):
    """Its code changes the current directory."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        os.chdir("/")
        return super().forward(features)


def test_a_relative_directory_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECFX_TRACE", "traces")
    recfx.convert(Wanders(collection()), (batch([1, 2, 3, 4]),))
    assert (tmp_path / "traces" / "001-Wanders" / "index.html").is_file()


class Stops(Wrapped):
    """Ctrl-C while it runs."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        raise KeyboardInterrupt


def test_a_conversion_that_is_interrupted_says_so(directory: Path) -> None:
    model = Stops(collection())
    with pytest.raises(KeyboardInterrupt):
        recfx.convert(model, (batch([1, 2, 3, 4]),))
    assert "failed: KeyboardInterrupt" in (directory / "001-Stops" / "index.html").read_text()
    assert "KeyboardInterrupt" in (directory / "001-Stops" / "error.txt").read_text()


def test_threads_do_not_share_a_folder(directory: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: recfx.convert(Wrapped(collection())), range(4)))
    folders = sorted(path.name for path in directory.iterdir() if path.is_dir())
    assert folders == [f"{number:03d}-Wrapped" for number in (1, 2, 3, 4)]
    assert all("graph.html" in names(directory / folder) for folder in folders)


def on_a_rank(rank: int, world_size: int, directory: str) -> list[str]:
    case = Case((Table("rows", 64, 8, ("f0",), "SUM", ("row_wise",)),), hashing=RAW, raw_ids=20)
    standard, width = build(case)
    os.environ["RECFX_TRACE"] = directory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", TraceWarning)
            converted = recfx.convert(Model(standard, width), hashing=case.hashing)
            plan = ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan_of(case, converted.sparse, world_size))})
            recfx.convert(converted, plan=plan)
            DistributedModelParallel(converted, plan=plan, sharders=recfx.sharders())
    finally:
        del os.environ["RECFX_TRACE"]
    return sorted(path.name for path in Path(directory).iterdir() if path.is_dir())


def test_ranks_do_not_share_a_folder(tmp_path: Path) -> None:
    ranks(2).run(on_a_rank, str(tmp_path))
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == [f"{number:03d}-Model-rank-{rank}" for number in (1, 2, 3) for rank in (0, 1)]
    for folder in folders:
        dist = "input_dist_start" in (tmp_path / folder / f"passes/{len(PASSES):02d}-lower.txt").read_text()
        assert dist is not folder.startswith("001")
    versions = json.loads((tmp_path / "003-Model-rank-1/versions.json").read_text())
    assert (versions["rank"], versions["world_size"]) == (1, 2)


SCRIPT = """
import recfx
from tests.inspect.models import Wrapped, collection
recfx.convert(Wrapped(collection()))
"""


def test_processes_do_not_share_a_folder(directory: Path) -> None:
    recfx.convert(Wrapped(collection()))
    done = run_script(SCRIPT, environment={"RECFX_TRACE": str(directory)})
    assert done.returncode == 0, done.stderr
    assert [path.name for path in sorted(directory.iterdir()) if path.is_dir()] == ["001-Wrapped", "002-Wrapped"]


def test_the_traced_model_is_an_ordinary_one(directory: Path) -> None:
    model: nn.Module = Wrapped(collection())
    converted = recfx.convert(model, inplace=True)
    assert converted is model
    assert (directory / "001-Wrapped/report.txt").read_text() == f"{recfx.explain(model)}\n"


def on_one_rank_alone(rank: int, world_size: int, directory: str) -> list[str]:
    """Rank 1 cannot write, so it does not make the report that rank 0 makes."""
    case = Case((Table("rows", 64, 8, ("f0",), "SUM", ("row_wise",)),), hashing=RAW, raw_ids=20)
    standard, width = build(case)
    model = recfx.convert(Model(standard, width), hashing=case.hashing)
    os.environ["RECFX_TRACE"] = directory if rank == 0 else "/dev/null"
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", TraceWarning)
            plan = ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan_of(case, model.sparse, world_size))})
            recfx.convert(model, plan=plan)
    finally:
        del os.environ["RECFX_TRACE"]
    return [str(warning.message) for warning in said if issubclass(warning.category, TraceWarning)]


def test_ranks_do_not_wait_for_one_that_cannot_write(tmp_path: Path) -> None:
    first, second = ranks(2).run(on_one_rank_alone, str(tmp_path))
    assert first == []
    assert "nothing is traced" in second[0]
    assert "graph.html" in names(tmp_path / "001-Model-rank-0")
