"""Every benchmark runs and prints what it promises; no test looks at a time."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", BENCHMARKS)
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


def test_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    main(["convert_time", "--quick", "--json", "--threads", "1"])
    assert torch.get_num_threads() == before


def test_names_the_benchmarks_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["backward"])
    assert f"no benchmark 'backward'; there are {', '.join(BENCHMARKS)}" in capsys.readouterr().err
