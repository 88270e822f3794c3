"""Every benchmark runs and prints what it promises; no test looks at a time."""

import json
from typing import Any

import pytest
import torch

from tests.bench import BENCHMARKS
from tests.bench.__main__ import main

PROMISED = {
    "name",
    "ours_ms",
    "peer",
    "peer_ms",
    "ratio",
    "tables",
    "rows",
    "dim",
    "batch",
    "bag_length",
    "ids",
    "threads",
}


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if not name.startswith("triton/")])
def test_prints_one_json_object_a_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--quick", "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert results
    for result in results:
        assert result.keys() >= PROMISED
        assert result["name"].startswith(f"{name}/")
        assert result["ratio"] == pytest.approx(result["ours_ms"] / result["peer_ms"], rel=0.05, abs=1e-3)
    if name in ("forward", "train_step"):
        _begins_with_converted_against_unconverted(results)


def _begins_with_converted_against_unconverted(results: list[dict[str, Any]]) -> None:
    """On one thread and on two, for what users have."""
    for threads in (1, 2):
        of_threads = [result for result in results if result["threads"] == threads]
        assert (of_threads[0]["ours"], of_threads[0]["peer"]) == ("converted collection", "EmbeddingBagCollection")
        against = [result for result in of_threads if result["peer"] == "EmbeddingBagCollection"]
        assert {result["pooling"] for result in against} == {"SUM", "MEAN", "SUM, weighted"}
        assert {result["ids"] for result in against} == {"uniform", "power law"}


def test_prints_a_setup_above_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forward", "--quick"]) == 0
    printed = capsys.readouterr().out
    for threads in ("1 thread,", "2 threads,"):
        assert f"4 tables, 500 rows, dim 16, batch 32, 3 ids per bag, power law ids, {threads}" in printed
    assert "ratio" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("names", "status"), [(["triton"], 3), (["triton/find_rows"], 3), ([], 0)])
def test_what_needs_a_device_says_so(
    names: list[str], status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line; that is no failure if all benchmarks were asked for."""
    of_devices = {name: module for name, module in BENCHMARKS.items() if name.startswith("triton/")}
    assert len(of_devices) == 6
    monkeypatch.setattr("tests.bench.__main__.BENCHMARKS", of_devices)
    assert main([*names, "--quick", "--json"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("not run: the kernels in Triton need a CUDA device, and torch ")


def broken(setup: object) -> None:
    raise AssertionError("results differ")


def test_goes_on_where_one_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    some = {"broken": "tests.test_bench:broken", "bag_offsets": BENCHMARKS["bag_offsets"]}
    monkeypatch.setattr("tests.bench.__main__.BENCHMARKS", some)
    assert main(["--quick", "--json"]) == 1
    printed = capsys.readouterr()
    assert '"bag_offsets/uniform"' in printed.out
    assert printed.err.endswith("failed: broken\n")


def test_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    main(["bucketize", "--quick", "--json", "--threads", "1"])
    assert torch.get_num_threads() == before
