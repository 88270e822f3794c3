"""What lowered graphs run on an NPU, against torch_npu's dispatch table: which operators go through the host.

``python -m tests.ascend.npu_runtime.coverage`` writes the table of ``host_round_trips.md`` anew, from a process of its
own that sees a simulated NPU. Reasons stay; those of new lines have to be written by hand.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from tests.ascend.npu_runtime import round_trips, sharded_coverage
from tests.ascend.npu_runtime.environment import environment, is_simulated, with_fallback
from tests.ascend.npu_runtime.recorder import Recorder, launching_nothing
from tests.ascend.npu_runtime.round_trips import Moment
from tests.ascend.npu_runtime.training import DEVICE, RAW_IDS
from tests.ascend.tools import ROOT
from tests.builders.batches import batch
from tests.builders.collections import sequences, table
from tests.builders.optimizers import OPTIMIZERS, attach
from tests.exporter import hashed_models
from tests.sharding.ranks import ranks

RAW = recfx.HashConfig(dense_rows=0)
HASHING: dict[str, recfx.HashConfig | None] = {
    "static": None,
    "adopted": recfx.HashConfig(),
    "hashed": RAW,
    "share": recfx.HashConfig(dense_rows=0, on_full="share", unseen="share"),
    "evict": recfx.HashConfig(dense_rows=0, on_full="evict"),
    "admit": recfx.HashConfig(dense_rows=0, on_full="evict", admit_after=2),
    "admit_share": recfx.HashConfig(dense_rows=0, on_full="evict", admit_after=2, unseen="share"),
}


# How ids become rows, and the fused optimizer.
TABLES = [*product(["adopted"], [*OPTIMIZERS, ""]), ("hashed", ""), *product(HASHING, ["adagrad"])]

TARGETS = ("reference", "npu", "npu[vendor]")
SEQUENCES = [("adopted", ""), *product(["adopted", "static", "hashed"], ["adagrad"])]
"""Likewise, of tables whose rows are not pooled."""


def measure() -> Recorder:
    """Every case: three training steps, and an eval forward after each. The same with a shard on each of two NPUs.

    Where torch_npu's fallback is switched off, an operator that decomposes into one without a kernel raises here.
    """
    recorder = Recorder(frozenset(round_trips.fallbacks()))
    for target in TARGETS:
        with launching_nothing(target) if target != "reference" else nullcontext():
            # The backward of both forms of target npu is one.
            tables = TABLES if target != "npu[vendor]" else [(name, "adagrad") for name in HASHING]
            for (name, optimizer), weighted in product(tables, (False, True)):
                _run(recorder, target, HASHING[name], optimizer, weighted)
            for name, optimizer in SEQUENCES:
                _run_sequences(recorder, target, HASHING[name], optimizer)
    for weighted in (False, True):
        _run_file(recorder, weighted)
    for target in TARGETS:
        for case in sharded_coverage.CASES[:: 2 if target == "npu[vendor]" else 1]:
            for of_rank in ranks(2, "hccl").run(sharded_coverage.measure, target, case):
                recorder.add(*of_rank)
    return recorder


def _run_file(recorder: Recorder, weighted: bool) -> None:
    """An eval forward of an exported file, with quantized rows among others."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"
        sample = hashed_models.call(6, is_weighted=weighted)
        quantize = {"mean": "int8", "shared_by_two": "int4"}
        recfx.export(hashed_models.trained(weighted), file, sample, device=DEVICE, quantize=quantize)
        loaded = recfx.load(file, device=DEVICE)
    arguments = [argument.to(torch.device(DEVICE)) for argument in sample.args]
    with recorder:
        recorder.now = Moment("exported", "unsharded", "eval")
        loaded(*arguments)
        recorder.now = None


def _run(recorder: Recorder, target: str, hashing: recfx.HashConfig | None, optimizer: str, weighted: bool) -> None:
    torch.manual_seed(0)
    second = PoolingType.SUM if weighted else PoolingType.MEAN
    tables = [table("t0", ["f0", "f1"]), table("t1", ["f2"], dim=12, pooling=second)]
    collection = EmbeddingBagCollection(tables, is_weighted=weighted)
    if optimizer:
        attach(collection, optimizer)
    model = recfx.convert(collection, hashing=hashing).to(DEVICE)
    gradient = torch.ones(4, 2 * 8 + 12, device=DEVICE)
    for _ in range(3):
        features = _ids(hashing, batch(4, ("f2", "f0", "f1"), weighted=weighted)).to(torch.device(DEVICE))
        if weighted:
            features.weights().requires_grad_(hashing is None or hashing.unseen != "share")
        with recorder:
            recorder.now = Moment(target, "unsharded", "training")
            model.train()(features).values().backward(gradient)
            recorder.now = Moment(target, "unsharded", "eval")
            with torch.no_grad():
                model.eval()(features)
            recorder.now = None
    assert sharded_coverage.kernels(model) == {target}


def _run_sequences(recorder: Recorder, target: str, hashing: recfx.HashConfig | None, optimizer: str) -> None:
    """Features come in the order of the tables: where they do not, their sizes depend on a kernel."""
    torch.manual_seed(0)
    collection = sequences()
    if optimizer:
        attach(collection, optimizer)
    model = recfx.convert(collection, hashing=hashing).to(DEVICE)
    for _ in range(3):
        features = _ids(hashing, batch(4)).to(torch.device(DEVICE))
        with recorder:
            recorder.now = Moment(target, "unsharded", "training")
            rows = [jagged.values() for jagged in model.train()(features).values()]
            recorder.now = None  # the gradients are those of the rest of the model
            gradients = [torch.ones_like(row) for row in rows]
            recorder.now = Moment(target, "unsharded", "training")
            torch.autograd.backward(rows, gradients)
            recorder.now = Moment(target, "unsharded", "eval")
            with torch.no_grad():
                model.eval()(features)
            recorder.now = None
    assert sharded_coverage.kernels(model) == {target}


def _ids(hashing: recfx.HashConfig | None, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Raw ids for the tables that take them."""
    if hashing is None or hashing.dense_rows != 0:
        return features
    factor, shift = RAW_IDS
    values = features.values() * factor + shift
    return KeyedJaggedTensor(features.keys(), values, features.weights_or_none(), features.lengths())


def main() -> int:
    if not is_simulated():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.ascend.npu_runtime.coverage"]
            given = with_fallback(environment(Path(folder)))
            return subprocess.run(command, cwd=ROOT, env=given, check=False).returncode
    recorder = measure()
    round_trips.write(recorder.meetings)
    without = [meeting for meeting, line in round_trips.read().items() if not line.why]
    print(f"{len(recorder.operators)} operators, {len(recorder.meetings)} lines, {len(without)} without a reason")
    return 1 if without else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch_npu's threads need not be waited for
