"""``python -m recfx graph``, ``verify`` and ``export``; help for all commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import recfx
from recfx import HashConfig, convert
from recfx.commandline.commands import COMMANDS
from recfx.commandline.main import _parser, main
from recfx.inspect import diff_steps
from recfx.inspect.explain import explain
from tests.inspect.models import dlrm

MODELS = "tests.inspect.models"
DLRM = "sparse_arch.embedding_bag_collection"


def test_the_graph_is_that_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", f"{MODELS}:dlrm", "--raw-ids"]) == 0
    final = capsys.readouterr().out
    assert "sparse_arch_embedding_bag_collection_hash_lookup = hash_lookup(" in final
    assert "kernel=cpu" in final
    assert main(["graph", f"{MODELS}:dlrm", "--raw-ids", "--after", "insert_hash"]) == 0
    middle = capsys.readouterr().out
    assert "sparse_arch_embedding_bag_collection_hash_ids = hash_ids(" in middle
    assert main(["graph", f"{MODELS}:dlrm", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (passes,) = (one.passes for one in explain(convert(dlrm()[0])).collections)
    assert printed["version"] == "1"
    assert [one["paths"] for one in printed["collections"]] == [[DLRM]]
    assert printed["collections"][0]["graph"] == passes[-1].graph
    assert [one["name"] for one in printed["collections"][0]["passes"]] == [one.name for one in passes]


def test_what_passes_changed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["graph", f"{MODELS}:dlrm", "--raw-ids", "--diff", "expand_collection", "insert_hash"]
    expected = diff_steps(convert(dlrm()[0], hashing=HashConfig(dense_rows=0)), "expand_collection", "insert_hash")
    assert "+sparse_arch_embedding_bag_collection_hash_ids = " in expected
    assert main(command) == 0
    assert capsys.readouterr().out == expected
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": "1", "diff": expected}
    assert main(["graph", f"{MODELS}:dlrm", "--diff", "before", "afterwards"]) == 1
    assert "[unknown_step]" in capsys.readouterr().err


def test_graphs_of_several_collections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", f"{MODELS}:towers"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m recfx graph: [own_forward] own: OwnForward has its own forward")
    assert printed.err.count("\n") == 1
    assert main(["graph", f"{MODELS}:towers", "--keep"]) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith("#")] == ["# user", "# unused", "# sequence"]
    assert main(["graph", f"{MODELS}:towers", "--keep", "--collection", "item"]) == 0
    assert capsys.readouterr().out.startswith("features = input\nuser_select_features = ")


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{MODELS}:dlrm"]) == 0
    assert capsys.readouterr().out.startswith("verification: ok (")
    assert main(["verify", f"{MODELS}:dlrm", "--raw-ids", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["version"], printed["ok"], printed["rtol"]) == ("1", True, 1e-5)
    assert {one["status"] for one in printed["checks"]} == {"equal"}
    assert set(printed["tables"][DLRM]) == {"t0", "t1"}


def test_managed_collisions_are_converted_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{MODELS}:managed_collisions", "--json"]) == 0
    assert [one["status"] for one in json.loads(capsys.readouterr().out)["collections"]] == ["kept"]
    assert main(["explain", f"{MODELS}:managed_collisions", "--managed-collisions", "convert", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in printed["collections"]] == ["convertible"]
    assert {"managed_collision_converted"} <= {reason["code"] for reason in printed["reasons"]}


def test_a_failed_verification_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{MODELS}:asks_for_its_class", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, text = tmp_path / "model.html", tmp_path / "model.dot"
    assert main(["draw", f"{MODELS}:dlrm", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": "1", "path": str(page), "bytes": page.stat().st_size}
    assert main(["draw", f"{MODELS}:dlrm", str(text), "--whole-graph", "--raw-ids"]) == 0
    assert capsys.readouterr().out == f"{text}: {text.stat().st_size:,} bytes\n"
    assert "hash_lookup" in text.read_text()
    assert "dense_arch" in text.read_text()
    assert main(["draw", f"{MODELS}:dlrm", str(tmp_path / "model.gif")]) == 1
    assert "[unknown_ending]" in capsys.readouterr().err


def test_ranks_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.dot"
    for hardware in ([], ["--hardware", "h100"], ["--hardware", "ascend_910b"], ["--hardware", "cpu"]):
        assert main(["draw", f"{MODELS}:dlrm", str(file), "--raw-ids", "--ranks", "8", *hardware]) == 0
        assert "rank 0 of 8 as planned" in file.read_text()
        assert "output_dist_start" in file.read_text()
        assert main(["cost", f"{MODELS}:dlrm", "--raw-ids", "--ranks", "8", "--json", *hardware]) == 0
        printed = json.loads(capsys.readouterr().out.partition("\n")[2])
        assert printed["world_size"] == 8
        assert any(node["kind"] == "input_dist_start" for node in printed["nodes"])


def test_cost(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cost", f"{MODELS}:dlrm", "--hardware", "h100", "--raw-ids"]
    numbers = []
    for more in (["--batch-size", "100"], ["--batch-size", "200"], ["--batch-size", "100", "--length", "f0=3"]):
        assert main([*command, "--json", *more]) == 0
        numbers.append(json.loads(capsys.readouterr().out))
    assert [one["batch"] for one in numbers] == [100, 200, 100]
    assert [one["lengths"] for one in numbers] == [{"f0": 2.0, "f1": 2.0}] * 2 + [{"f0": 3.0, "f1": 2.0}]
    read = [one["totals"]["read_bytes"] for one in numbers]
    assert read[0] < read[1]
    assert read[0] < read[2]
    assert numbers[0]["hardware"]["name"] == "H100"
    assert main(["cost", f"{MODELS}:dlrm", "--hardware", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["name"] == "CPU"
    assert main([*command, "--length", "f1=4", "--length", "1"]) == 0
    assert capsys.readouterr().out.startswith("B=2 (of the sample), L: f1=4, f0=1 (as given), training step\n")
    assert main([*command, "--length", "x=2"]) == 1
    assert "[unknown_feature] L names 'x'" in capsys.readouterr().err
    assert main([*command, "--expressions"]) == 0
    assert "L_f0" in capsys.readouterr().out
    assert main([*command, "--eval"]) == 0
    assert "B=" in capsys.readouterr().out


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
        (["train", f"{MODELS}:dlrm"], "invalid choice"),
        (["explain"], "module:factory"),
        (["graph", f"{MODELS}:dlrm", "--after", "fusion"], "there is no pass 'fusion'; there are: expand_collection, "),
        (["graph", f"{MODELS}:dlrm", "--collection", "x"], f"no converted collection 'x'; there are: {DLRM}"),
        (["graph", f"{MODELS}:dlrm", "--diff", "before", "lower", "--after", "lower"], "leave out the other options"),
        (["verify", f"{MODELS}:only_model"], "only_model returns no sample"),
        (["verify", f"{MODELS}:converted_dlrm"], "converted_dlrm returns a converted model"),
        (["draw", f"{MODELS}:only_model", "x.dot", "--whole-graph"], "only_model returns no sample"),
        (["draw", f"{MODELS}:dlrm", "x.dot", "--ranks", "2", "--whole-graph"], "--whole-graph does not fit --ranks"),
        (["cost", f"{MODELS}:dlrm", "--ranks", "0"], "--ranks 0: there must be one at least"),
        (
            ["draw", f"{MODELS}:dlrm", "none.html", "--ranks", "2000000"],
            "--ranks 2000000: there can be 1,048,576 at most",
        ),
        (["cost", f"{MODELS}:dlrm", "--length", "many"], "--length many: 'many' is not a number"),
        (["cost", f"{MODELS}:dlrm", "--length", "1", "--length", "2"], "--length 2: there is another value for all"),
        (["export", f"{MODELS}:only_model", "model.pt"], "only_model returns no sample"),
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


def test_raw_ids_for_a_converted_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", f"{MODELS}:converted_dlrm"]) == 0
    capsys.readouterr()
    assert main(["graph", f"{MODELS}:converted_dlrm", "--raw-ids"]) == 1
    assert capsys.readouterr().err.startswith("python -m recfx graph: [")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.name)
def test_help_has_an_example_that_parses(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([command.name, "--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    example = text.partition("example:\n  python -m recfx ")[2].partition("\n")[0]
    assert _parser().parse_args(shlex.split(example)).command == command.name
    assert "exit status:" in text
    assert "--json" in text
    assert "--traceback" in text
    assert max(map(len, text.partition("options:")[0].splitlines())) <= 120


def test_a_sample_that_is_no_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["draw", f"{MODELS}:wrong_sample", str(tmp_path / "model.html"), "--whole-graph"]
    assert main(command) == 1
    assert capsys.readouterr().err.startswith("python -m recfx draw: [sample_failed] the model cannot be called with")


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-1"])
def test_a_tolerance_that_is_none(tolerance: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{MODELS}:dlrm", f"--rtol={tolerance}"]) == 1
    assert "[invalid_argument] rtol is" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"recfx {recfx.__version__}\n"
