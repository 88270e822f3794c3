"""``python -m recfx``: what its commands print and write, and their exit statuses, for CI."""

import io
import json
import sys
from pathlib import Path

import pytest

import recfx
from recfx.commandline.main import main
from recfx.inspect.explain import explain
from recfx.planner.plan_file import read_plan
from recfx.versions.differences import make_topology
from tests.drawing.page_data import text_of
from tests.inspect.models import dlrm, only_model

MODELS = "tests.inspect.models"
DLRM = "sparse_arch.embedding_bag_collection"


def test_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{MODELS}:dlrm", "--raw-ids", "--graph"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"# {DLRM}\nfeatures = input\n")
    assert "sparse_arch_embedding_bag_collection_hash_lookup = hash_lookup(" in printed
    assert "kernel=cpu" in printed
    assert main(["explain", f"{MODELS}:towers", "--graph"]) == 1
    assert "own_forward" in capsys.readouterr().out  # what is refused is the report
    assert main(["explain", f"{MODELS}:towers", "--graph", "--keep"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert heads == ["# user", "# unused", "# sequence"]


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    for factory, status in (("dlrm", 0), ("asks_for_its_class", 1)):
        assert main(["explain", f"{MODELS}:{factory}", "--verify", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["verification"]["ok"] is (status == 0)


def test_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, text = tmp_path / "model.html", tmp_path / "whole.html"
    assert main(["draw", f"{MODELS}:dlrm", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": "1", "path": str(page), "bytes": page.stat().st_size}
    assert main(["draw", f"{MODELS}:dlrm", str(text), "--whole-graph", "--raw-ids"]) == 0
    assert capsys.readouterr().out == f"{text}: {text.stat().st_size:,} bytes\n"
    assert "hash_lookup" in text_of(text)
    assert "dense_arch" in text_of(text)
    assert main(["draw", f"{MODELS}:dlrm", str(tmp_path / "model.gif")]) == 1
    assert "[unknown_ending]" in capsys.readouterr().err


def test_ranks_that_are_not_there(tmp_path: Path) -> None:
    file = tmp_path / "model.html"
    for hardware in ([], ["--hardware", "h100"], ["--hardware", "ascend_910b"], ["--hardware", "cpu"]):
        assert main(["draw", f"{MODELS}:dlrm", str(file), "--raw-ids", "--ranks", "8", *hardware]) == 0
        assert "rank 0 of 8 as planned" in text_of(file)
        assert "output_dist_start" in text_of(file)


def test_a_plan_is_written_explained_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page, model = tmp_path / "plan.json", tmp_path / "model.html", f"{MODELS}:dlrm"
    assert main(["plan", model, str(file), "--ranks", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert read_plan(file).plan == recfx.plan(recfx.convert(dlrm()[0]), make_topology(16, "cpu")).plan
    assert main(["explain", model, "--plan", str(file), "--no-verify", "--json"]) == 0
    (collection,) = json.loads(capsys.readouterr().out)["collections"]
    assert {table["sharding"]["world_size"] for table in collection["tables"]} == {16}
    assert main(["draw", model, str(page), "--plan", str(file), "--hardware", "h100"]) == 0
    assert "rank 0 of 16 as planned" in text_of(page)


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.pt"
    assert main(["export", f"{MODELS}:dlrm", str(file), "--json", "--quantize", "t0=int8", "--raw-ids"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["version"], printed["path"], printed["bytes"]) == ("1", str(file), file.stat().st_size)
    assert [table["stored_as"] for table in printed["tables"]] == ["int8", "fp32"]
    assert all(table["slot_bytes"] for table in printed["tables"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["verify", f"{MODELS}:dlrm"], "invalid choice: 'verify'"),
        (["explain", f"{MODELS}:dlrm", "--hardware", "h100"], "it needs --ranks"),
        (["draw", f"{MODELS}:only_model", "x.html", "--whole-graph"], "only_model returns no sample"),
        (["draw", f"{MODELS}:dlrm", "x.html", "--ranks", "2", "--whole-graph"], "--whole-graph does not fit --ranks"),
        (["plan", f"{MODELS}:dlrm", "x.json", "--ranks", "0"], "--ranks 0: there must be one at least"),
        (["export", f"{MODELS}:dlrm", "model.pt", "--quantize", "t0=int8", "--quantize", "fp16"], "takes one format"),
    ],
)
def test_usage_errors_are_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert "--traceback shows" not in printed.err  # there is nothing to show


def test_text_and_status_of_a_good_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{MODELS}:only_model"]) == 0
    assert capsys.readouterr().out == f"{explain(only_model())}\n"


def test_sample_is_used_and_refusal_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{MODELS}:towers", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [one["found"] for one in report["collections"]] == ["traced", "traced", "never called", "traced"]


def test_html_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert main(["explain", f"{MODELS}:only_model", "--html", str(page)]) == 0
    assert page.read_text() == explain(only_model()).to_html()
    assert capsys.readouterr().out.startswith("1 collection: 1 convertible. OK\n")


def test_a_file_that_cannot_be_written_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{MODELS}:only_model", "--html", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert str(tmp_path) in printed.err


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("more", ["", "--graph"])
def test_names_fit_every_terminal(more: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    page = tmp_path / "report.html"
    assert main(["explain", f"{MODELS}:strange_names", "--html", str(page), *more.split()]) == 0
    text = written.getvalue().decode(encoding)
    assert {letter for letter in text + page.read_text(encoding="utf-8") if not letter.isprintable()} == {"\n"}
    assert "a\\nb" in text
    assert ("таблица⚡" in text) is (encoding == "utf-8")
    assert "esc\\x1b[31m\\x00" in page.read_text(encoding="utf-8")
