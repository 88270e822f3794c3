"""``python -m recfx doctor``: its report and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recfx.commandline.doctor import examine as examine_module
from recfx.commandline.doctor.report import Finding
from recfx.commandline.main import main

REPOSITORY = Path(__file__).parents[2]


def test_a_report_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--quick", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert (report["ok"], report["complete"], report["how"], report["stopped"]) == (True, True, "real", "")
    assert report["answers"]
    assert report["speeds"]
    assert str(Path.home()) not in text or len(str(Path.home())) == 1


def test_something_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gone = Finding("torchrec", f"not in {Path.home()}", "pip install torchrec")
    monkeypatch.setattr(examine_module, "packages", lambda device: [gone])
    monkeypatch.setattr(examine_module, "cann", lambda: [])
    monkeypatch.setattr(examine_module, "machine", lambda device: [])
    assert main(["doctor", "--device", "npu", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["findings"][0]["found"] == f"not in {'~' if len(str(Path.home())) > 1 else Path.home()}"
    assert report["stopped"].startswith("Nothing was run: ")


def test_what_fails_while_it_is_measured_is_in_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> float:
        raise RuntimeError("no code for this kernel")

    monkeypatch.setattr(examine_module, "check_all", lambda device, quick: [])
    monkeypatch.setattr("recfx.commandline.doctor.speed.median_ms", fail)
    assert main(["doctor", "--device", "cpu", "--quick", "--json"]) == 1
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert (answer["name"], answer["message"]) == ("measuring a copy", "RuntimeError: no code for this kernel")


def test_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    """As if CANN's environment script had not been sourced."""
    (tmp_path / "torch.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, REPOSITORY)))}
    done = subprocess.run(
        [sys.executable, "-m", "recfx", "doctor", "--device", "npu", "--json"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert "libhccl.so" in by_name["torch"]["found"]
    assert "source CANN" in by_name["torch"]["what_to_do"]
    assert "set_env.sh" in by_name["CANN"]["what_to_do"]
