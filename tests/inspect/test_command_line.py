"""``python -m recfx explain``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recfx.__main__ import main
from recfx.inspect.explain import explain
from tests.inspect.models import only_model

MODELS = "tests.inspect.models"
REPOSITORY = Path(__file__).parents[2]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["draw", f"{MODELS}:dlrm"], "invalid choice"),
        (["explain"], "module:factory"),
        (["explain", MODELS], "is not module:factory"),
        (["explain", f"{MODELS}:"], "is not module:factory"),
        (["explain", "tests.inspect.absent:dlrm"], "there is no module 'tests.inspect.absent'"),
        (["explain", f"{MODELS}:absent"], "has no 'absent'"),
        (["explain", f"{MODELS}:some_model"], "is a Identity, not a function"),
        (["explain", f"{MODELS}:nothing"], "returns a NoneType"),
    ],
)
def test_usage_errors_are_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_the_factory_s_own_failure_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="the factory's own failure"):
        main(["explain", f"{MODELS}:fails"])


def test_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recfx", "explain", f"{MODELS}:towers"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("4 collections: 2 convertible, 1 kept, 1 refused. NOT OK\n")
