"""``python -m recfx explain``: the report, and an exit status for CI."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from recfx.commandline.main import main
from recfx.inspect.explain import explain
from tests.inspect.models import only_model

MODELS = "tests.inspect.models"


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


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "report.html"
    page.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["explain", f"{MODELS}:only_model", "--html", str(page)]) == 1
    assert page.read_text() == "before"
    assert list(tmp_path.iterdir()) == [page]


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
