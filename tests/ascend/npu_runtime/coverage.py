"""What lowered graphs run on an NPU, against torch_npu's dispatch table: which operators go through the host.

``python -m tests.ascend.npu_runtime.coverage`` writes the table of ``host_round_trips.md`` anew, from a process of its
own that sees a simulated NPU. Reasons stay; those of new lines have to be written by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from recfx.ir import format_graph
from recfx.kernels import launch
from recfx.lowering import _triton_lookup
from tests.ascend.npu_runtime import round_trips
from tests.ascend.npu_runtime.environment import environment, is_simulated, with_fallback
from tests.ascend.npu_runtime.round_trips import COPY, FALLBACK, INSIDE, WAITS, Meeting, Occasion
from tests.ascend.npu_runtime.training import DEVICE, RAW_IDS
from tests.ascend.tools import ROOT
from tests.builders.batches import batch
from tests.builders.collections import table
from tests.builders.optimizers import OPTIMIZERS, attach

# The table of dispatch says "kernel", but that kernel copies everything to the host, computes there and copies back.
_COPY_INSIDE = frozenset({"aten::_embedding_bag_per_sample_weights_backward"})
# Their results are as long as the data say.
_WAIT = frozenset(
    f"aten::{name}" for name in ("_unique2", "unique_consecutive", "unique_dim", "nonzero", "masked_select")
)

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


def served_by(operator: str) -> str:
    """How torch_npu serves an operator: ``kernel``, ``default backend kernel``, ``backend fallback``, ..."""
    lines = torch._C._dispatch_dump_table(operator).splitlines()
    return next((line.rpartition("[")[2].rstrip("]") for line in lines if line.startswith("PrivateUse1:")), "")


class Recorder(TorchDispatchMode):
    """Records operators that are called with tensors on an NPU, or make some.

    Args:
        allowed: operators that run on the host and were given a kernel for the simulation, so that the table of
            dispatch does not tell.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        super().__init__()
        self._allowed = allowed
        self.now: tuple[str, str] | None = None
        self.operators: set[str] = set()
        self._seen: defaultdict[Meeting, set[tuple[str, str]]] = defaultdict(set)

    @property
    def meetings(self) -> dict[Meeting, Occasion]:
        """Where the host was involved, and when."""
        return {meeting: Occasion.of(seen) for meeting, seen in self._seen.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _devices((args, kwargs)), _devices(result)  # of an argument that is written to: as it was
        if self.now and "npu" in given | made:
            self.operators.add(func.name())
            how = self._how(func.name(), given, made)
            if how:
                self._seen[Meeting(func.name(), how, _where(sys._getframe(1)))].add(self.now)
        return result

    def _how(self, name: str, given: set[str], made: set[str]) -> str:
        if served_by(name) == "backend fallback" or name in self._allowed:
            return FALLBACK
        if name in _COPY_INSIDE:
            return INSIDE
        if name in _WAIT:
            return WAITS
        return COPY if "npu" in given and (name == "aten::_local_scalar_dense" or "cpu" in made) else ""


def _devices(values: Any) -> set[str]:
    return {each.device.type for each in tree_leaves(values) if isinstance(each, torch.Tensor)}


def _where(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/recfx/"):
            return path.removeprefix(f"{ROOT}/")
        frame = frame.f_back
    return "autograd"


def measure() -> Recorder:
    """Every case: three training steps, and an eval forward after each.

    Where torch_npu's fallback is switched off, an operator that decomposes into one without a kernel raises here.
    """
    recorder = Recorder(frozenset(round_trips.fallbacks()))
    for target in ("reference", "npu"):
        with _launching_nothing() if target == "npu" else nullcontext():
            for (name, optimizer), weighted in product(TABLES, (False, True)):
                _run(recorder, target, HASHING[name], optimizer, weighted)
    return recorder


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Let target ``npu`` serve, and do everything that it does around its kernels, which are not launched.

    Results are whatever was in memory, and nothing here depends on them. The operators with kernels are called as the
    functions that they are, because no dispatch mode sees what runs inside an operator.
    """
    operators = ("pooled_lookup_triton", "per_sample_weight_gradients_triton", "fused_step_triton_")
    with ExitStack() as patches:
        for name, answer in (("why_not", ""), ("simulated", False), ("launch", None)):
            patches.enter_context(patch.object(launch, name, lambda *_, _answer=answer, **__: _answer))
        for name in operators:
            inner = getattr(_triton_lookup, name)._init_fn
            patches.enter_context(patch.object(_triton_lookup, name, inner))
        yield


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
            features.weights().requires_grad_()
        with recorder:
            recorder.now = (target, "training")
            model.train()(features).values().backward(gradient)
            recorder.now = (target, "eval")
            with torch.no_grad():
                model.eval()(features)
            recorder.now = None
    assert f"kernel={target}" in format_graph(model.graph_module)


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
    without = [each for each, line in round_trips.read().items() if not line.why]
    print(f"{len(recorder.operators)} operators, {len(recorder.meetings)} lines, {len(without)} without a reason")
    return 1 if without else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch_npu's threads need not be waited for
