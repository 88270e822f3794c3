"""The benchmarks of kernels in Triton run: here in its interpreter, so that they do on the first GPU, too."""

import json

import pytest

from tests.ascend.interpreter import WITHOUT_TORCHREC, run_interpreted
from tests.bench.triton.models import NAMES

BENCH = """\
import runpy, sys
from tests.ascend.faster_interpreter import make_faster
from tests.support.room import with_room
make_faster()
with_room(runpy.run_module, "tests.bench", run_name="__main__", alter_sys=True)
"""
COMMANDS = {"with FBGEMM": ["-c", BENCH], "without TorchRec": ["-c", WITHOUT_TORCHREC + BENCH]}
STEMS = {"with FBGEMM": ["triton"], "without TorchRec": ["triton/fused_optimizer", "triton/find_rows"]}
PEERS = {
    "pooled_lookup": {"F.embedding_bag a table", "FBGEMM on the device"},
    "fused_optimizer": {"embedding_bag and torch.optim", "embedding_bag's backward alone", "FBGEMM on the device"},
    "per_sample_weights": {"embedding_bag's backward"},
    "find_rows": {"torch.searchsorted a table", "FBGEMM on the device"},
    "quantized_lookup": {"F.embedding_bag of float32", "FBGEMM on the device"},
    "models": set(NAMES[1:]),
}
FURTHER = {
    "fused_optimizer": {"optimizer": {"sgd", "adagrad", "rowwise_adagrad", "adam"}},
    "pooled_lookup": {"dtype": {"torch.float32", "torch.float16"}, "dim": {16, 512, "mixed"}},
    "models": {"name": {"triton/models/eval", "triton/models/train"}, "peer_launches": {0}},  # the CPU has none
}


@pytest.mark.parametrize("command", COMMANDS)
def test_run_and_give_bandwidths(command: str) -> None:
    printed = run_interpreted(*COMMANDS[command], *STEMS[command], "--quick", "--json", "--device", "cpu")
    results = [json.loads(line) for line in printed.splitlines()]
    for stem, peers in PEERS.items():
        if not {"triton", f"triton/{stem}"} & set(STEMS[command]):
            continue
        own = [result for result in results if result["name"].startswith(f"triton/{stem}/")]
        expected_peers = peers if command == "with FBGEMM" else peers - {"FBGEMM on the device"}
        assert {result["peer"] for result in own} == expected_peers
        assert {result["ids"] for result in own} == {"power law"} | set(["uniform"] * (stem != "models"))
        for name, values in FURTHER.get(stem, {}).items():
            assert {result[name] for result in own} == values
    for result in results:
        for who in ("ours", "peer") if "copy_gb_s" in result else ():
            assert result[f"{who}_gb_s"] >= 0
            share = result[f"{who}_gb_s"] / result["copy_gb_s"]
            assert result[f"{who}_share_of_copy"] == pytest.approx(share, abs=1e-4 + 1e-4 / result["copy_gb_s"])
        assert {"device", "torch", "triton", "tables", "rows", "dim", "batch"} <= result.keys()
        assert result["device"] == "cpu, interpreted: measures nothing"
