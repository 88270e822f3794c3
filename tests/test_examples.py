"""The examples: each runs, and what it prints is right; and what they say of arguments that cannot be used.

Most run in this process. Ranks run in processes of their own, once under torchrun; one example runs as from a shell.
"""

import difflib
import json
import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.run

import recfx
from tests.drawing.page_data import data_of
from tests.support import notebook
from tests.support.forked_script import run_script
from tests.support.own_operators import forgotten_afterwards
from tests.support.ports import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"
PATHS = os.pathsep.join(path for path in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if path)
"""For interpreters that begin anew, also where recfx is not installed."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs an example in this process; exceptions come out of it."""
    loggers = [logging.getLogger(name) for name in (None, "torchrec", "torch.fx")]
    levels = [logger.level for logger in loggers]
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        capfd.readouterr()
        status: object = None
        try:
            with forgotten_afterwards():
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code
        printed = capfd.readouterr()
        if isinstance(status, str):  # the interpreter would print it
            return subprocess.CompletedProcess(sys.argv, 1, printed.out, printed.err + status)
        return subprocess.CompletedProcess(sys.argv, int(str(status or 0)), printed.out, printed.err)

    yield run
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def run_on_ranks(name: str, *arguments: str, processes: int) -> subprocess.CompletedProcess[str]:
    """As many processes of an example as ``torchrun`` would start, with the variables that it sets."""
    port = str(free_port())

    def run_rank(rank: int) -> subprocess.CompletedProcess[str]:
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
            "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        return run_script(EXAMPLES / f"{name}.py", *arguments, environment=environment)

    with ThreadPoolExecutor(processes) as pool:
        finished = list(pool.map(run_rank, range(processes)))
    failed = next((rank.returncode for rank in finished if rank.returncode), 0)
    printed = ["".join(texts) for texts in zip(*((rank.stdout, rank.stderr) for rank in finished), strict=True)]
    return subprocess.CompletedProcess(finished[0].args, failed, *printed)


def assert_ended_well(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "terminate called" not in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_script_for_torchrun_takes_one_line_and_an_import() -> None:
    """They are what README shows; both scripts end with the same losses."""
    before, after = ((EXAMPLES / f"torchrun_{name}.py").read_text().split('"""\n\n')[1] for name in ("before", "after"))
    hunk = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm=""))[3:]
    changed = [line for line in hunk if line[:1] in "+-" and line != "+"]
    assert changed == ["+import recfx", "+model = recfx.convert(model)"]
    shown = "\n".join(line.rstrip() for line in hunk)
    assert f"```diff\n{shown}\n```\n" in (REPOSITORY / "README.md").read_text()
    losses = []
    for name in ("before", "after"):
        finished = run_on_ranks(f"torchrun_{name}", processes=2)
        assert_ended_well(finished)
        losses.append(re.findall(r"rank \d: loss \d\.\d{6}\n", finished.stdout))
    assert len(losses[0]) == 2
    assert all(float(line.split()[-1]) < 0.01 for line in losses[0])
    assert losses[1] == losses[0]


@pytest.mark.parametrize("data", ["generated", "ml-100k/ml-100k.inter"])
def test_demo(
    run_example: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: str
) -> None:
    files = [] if data == "generated" else ["--data", str(request.getfixturevalue("data_directory") / data)]
    monkeypatch.delenv("RECFX_DATA", raising=False)
    monkeypatch.chdir(tmp_path)  # where no server is, of whatever version
    with mock.patch.object(recfx, "save_checkpoint", wraps=recfx.save_checkpoint) as save_checkpoint:
        finished = run_example("train_dlrm", "--smoke", *files)
    assert_ended_well(finished)
    save_checkpoint.assert_called_once()
    assert "FAIL" not in finished.stdout
    assert finished.stdout.count("\nok  ") == 6
    assert "nothing ran on an NPU" in finished.stdout
    assert ("569 rows from ml-100k.inter" in finished.stdout) == (data != "generated")
    lost = dict(re.findall(r"^(\S.*?\S) +(?:modulo|raw) .* ms .* ([\d,]+) of [\d,]+$", finished.stdout, re.MULTILINE))
    assert list(lost) == ["EmbeddingBagCollection", "TorchRec's managed collisions", "recfx, adopted", "recfx, hashed"]
    assert lost["EmbeddingBagCollection"] == lost["recfx, adopted"] != "0"
    assert lost["recfx, hashed"] == "0"
    assert re.search("\nTorchRec's managed collisions +raw +- .*\n(.*\n)+.*: so far, no id has one", finished.stdout)
    assert ("\nthe truth " in finished.stdout) == (data == "generated")
    assert "recfx.monitor, fullest table: sparse_arch.embedding_bag_collection.embedding_bags.table_" in finished.stdout
    assert "loss=" in finished.stderr
    told = re.findall(r"^(?:recfx\.\w+|C\+\+ server) +(\S+)", finished.stdout, re.MULTILINE)
    assert len(told) == 6
    assert "verification: ok" in Path(told[0]).read_text(encoding="utf-8")
    kinds = {node["kind"] for node in data_of(Path(told[2]))["nodes"]}
    assert {"input_dist_start", "output_dist_start"} <= kinds
    assert "not built: make serve, then build/serve_cpp/recfx_serve build/demo/dlrm.pt < " in finished.stdout
    for path in told:
        assert Path(path).stat().st_size


@pytest.mark.parametrize("data", ["generated", "ml-100k/ml-100k.inter"])
def test_a_sequence_model(run_example: Run, request: pytest.FixtureRequest, data: str) -> None:
    files = [] if data == "generated" else ["--data", str(request.getfixturevalue("data_directory") / data)]
    finished = run_example("train_sequence", "--smoke", *files)
    assert_ended_well(finished)
    assert "FAIL" not in finished.stdout
    assert finished.stdout.count("\nok  ") == 2
    assert ("943 users rated 1,682 films 100,000 times" in finished.stdout) == bool(files)
    assert finished.stdout.count("recall@10 of the film that users rate next: ") == 2


def test_whole_life(run_example: Run) -> None:
    finished = run_example("whole_life")
    assert_ended_well(finished)  # 1 if the resumed model answers as no other
    days = re.findall(r"^day (\d): loss ([\d.]+), (\d+) items", finished.stdout, re.MULTILINE)
    assert [int(number) for number, _, _ in days] == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert days[3:6] == days[6:]
    assert int(days[5][2]) > int(days[2][2]) > 0  # evicted before the stop, and after it
    assert float(days[5][1]) < float(days[0][1])


def test_push_changes(run_example: Run, tmp_path: Path) -> None:
    finished = run_example("push_changes", "--pushes", "2", "--steps", "3", "--folder", str(tmp_path))
    assert_ended_well(finished)
    assert re.findall(r"^delta (\d): [\d,]+ rows", finished.stdout, re.MULTILINE) == ["1", "2"]
    assert finished.stdout.endswith("answers of a whole export: the same\n")


@pytest.mark.parametrize(("processes", "optimizer"), [(1, "adam"), (2, "adagrad")])
def test_rec_sdk_quick_start(run_example: Run, processes: int, optimizer: str) -> None:
    arguments = ("--optimizer", optimizer, "--epochs", "2", "--batches", "10")
    if processes == 1:
        finished = run_example("rec_sdk_quickstart", *arguments)
    else:
        finished = run_on_ranks("rec_sdk_quickstart", *arguments, processes=processes)
    assert_ended_well(finished)  # 1 if the loss did not fall
    assert finished.stdout.count(": 20 steps, loss") == processes
    assert finished.stdout.count("demo done") == 1
    assert f"rank:{processes - 1}/cpu" in finished.stdout


def test_own_pass(run_example: Run) -> None:
    finished = run_example("own_pass")
    assert_ended_well(finished)
    assert "ebc_clip_gradients = clip_gradients(ebc_lookup) {max_norm=0.5}" in finished.stdout
    assert "a step moves a row by 455.5, with the pass by 0.4" in finished.stdout
    assert "the operator's backward reads 128*B bytes" in finished.stdout
    assert "drawn, exported, and loaded again: the answers are equal" in finished.stdout


def test_explore_sharding_starts_its_processes() -> None:
    arguments = ("--world-size", "4", "--type", "table_row_wise", "--type", "grid_shard")
    finished = run_script(EXAMPLES / "explore_sharding.py", *arguments)
    assert_ended_well(finished)
    assert finished.stdout.count("at most 0.0e+00 from the unsharded collection") == 8
    assert "ebc_output_dist_wait_1 = output_dist_wait(ebc_output_dist_start_1)" in finished.stdout


def test_explore_sharding_under_torchrun() -> None:
    """``torchrun`` starts as many interpreters, which import everything anew."""
    torchrun = Path(torch.distributed.run.__file__)
    arguments = ("--standalone", "--nproc-per-node=2", str(EXAMPLES / "explore_sharding.py"), "--type", "row_wise")
    finished = run_script(torchrun, *arguments, environment={"PYTHONPATH": PATHS}, directory=REPOSITORY)
    assert_ended_well(finished)
    assert "large_1    (2048, 64)  rows 2048..4095 columns 0..63" in finished.stdout
    assert "ebc_bucketize = bucketize(ebc_select_features)" in finished.stdout


def test_profile_step(run_example: Run, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    finished = run_example("profile_step", "--smoke", "--trace", str(trace))
    assert_ended_well(finished)
    (line,) = [line for line in finished.stdout.splitlines() if "_hash_lookup" in line]
    node, *numbers = line.replace(" ms", "").split()
    assert len(numbers) == 6  # forward, backward, step, all of them, predicted, ratio
    assert float(numbers[3]) == pytest.approx(sum(map(float, numbers[:3])), abs=0.002)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {node, f"{node} (backward)", f"{node} (step)"} <= names


def test_the_notebook_is_what_its_script_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["torchrec_tour"])
    module = ModuleType("tour")
    monkeypatch.setitem(sys.modules, "tour", module)  # torch.fx looks up the module of traced classes
    written = json.loads((EXAMPLES / "torchrec_tour.ipynb").read_text())["cells"]
    made = notebook.cells((EXAMPLES / "torchrec_tour.py").read_text())
    assert [cell["source"] for cell in made] == [cell["source"] for cell in written]  # or: make notebook
    notebook.run(made, module.__dict__)
    assert printed(made) == printed(written)
    assert sum(cell["source"][0].startswith("## ") for cell in made if cell["cell_type"] == "markdown") == 9
    assert (EXAMPLES / "torchrec_tour.ipynb").stat().st_size < 100_000


def printed(cells: list[dict[str, Any]]) -> list[str]:
    """What the cells of a notebook print, without digits: losses differ a little between machines."""
    texts = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    return [re.sub(r"\d", "0", text) for text in texts if text]


def test_torchrec_tour_on_two_ranks() -> None:
    finished = run_on_ranks("torchrec_tour", processes=2)
    assert_ended_well(finished)  # 1 if a loss did not fall
    assert "the same as sharded(features): True" in finished.stdout
    assert "product  bag of each sample: [[101, -9223372036854775808], []]" in finished.stdout
    assert "its fused optimizer is a CombinedOptimizer" in finished.stdout
    told = [line.split(" has bags")[0] for line in finished.stdout.splitlines() if " has bags" in line]
    assert told == ["rank 0", "rank 1"]
    assert "the loaded file answers as the model does: True" in finished.stdout


def test_inference() -> None:
    """``python examples/inference.py``: what importing says, and how the interpreter ends, are part of it."""
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / "inference.py"), "--smoke"],
        capture_output=True, text=True, check=False, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": PATHS},
        timeout=300,
    )  # fmt: skip
    assert_ended_well(finished)  # 1 if an answer was too different
    for told in (
        "recfx.export, quantize=None: largest difference",
        "recfx.export, quantize='int8': largest difference",
        "shard_quant_model: [26] tables on the devices: largest difference",
        "shard_quant_model: [13, 13] tables on the devices: largest difference",
        "torch.jit.script, save, load: largest difference",
        "nothing ran on an NPU",
    ):
        assert told in finished.stdout
    assert finished.stdout.count("\nok  ") == 12 - finished.stdout.count(
        "it is left out"
    )  # beside FBGEMM 1.4 and older
    assert "Warning" not in finished.stderr
