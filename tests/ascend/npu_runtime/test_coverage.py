"""Where lowered graphs leave the AI Cores of an NPU is what ``host_round_trips.md`` says, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import recfx
from recfx.runtime.bags import permute_features
from tests.ascend import tools
from tests.ascend.npu_runtime import engines, round_trips
from tests.ascend.npu_runtime.coverage import measure
from tests.ascend.npu_runtime.engines import CHIPS, engine
from tests.ascend.npu_runtime.recorder import Recorder, launching_nothing, served_by
from tests.ascend.npu_runtime.round_trips import AI_CPU, COPY, FALLBACK, UNKNOWN, WAITS, Meeting, Moment
from tests.builders.batches import batch
from tests.builders.collections import one_table

HOW_TO = (
    "if this is right, run `python -m tests.ascend.npu_runtime.coverage` and write down the reason of each new line"
)


def test_the_table_is_what_is_found() -> None:
    tools.triton().require()
    recorder = measure()
    meetings = recorder.meetings
    listed = {meeting: line.occasion for meeting, line in round_trips.read().items()}
    new = [
        f"not listed: {meeting}, first at {recorder.lines[meeting]}, {when}"
        for meeting, when in meetings.items()
        if listed.get(meeting) != when
    ]
    gone = [f"no longer true: {meeting}, {when}" for meeting, when in listed.items() if meetings.get(meeting) != when]
    assert not new + gone, "\n".join([*new, *gone, HOW_TO])


def test_nothing_of_target_npu_runs_on_the_ai_cpu() -> None:
    """Nor on an engine that the sources leave open: what the table lists of these belongs to other targets."""
    slow = [meeting for meeting, line in round_trips.read().items() if meeting.how.startswith((AI_CPU, UNKNOWN))]
    assert not [meeting for meeting in slow if "npu" in round_trips.read()[meeting].occasion.target.split("; ")]


def test_every_line_has_a_reason() -> None:
    without = [meeting for meeting, line in round_trips.read().items() if not line.why]
    assert not without, HOW_TO


def test_an_operator_without_a_kernel_is_an_error_here() -> None:
    """Unless it is listed. So nothing in these tests runs on the host unseen, not even inside another operator."""
    assert served_by("aten::segment_reduce") == "backend fallback"
    with pytest.raises(RuntimeError, match="segment_reduce"):
        torch.segment_reduce(torch.ones(3, device="npu:0"), "sum", lengths=torch.tensor([1, 2], device="npu:0"))


def test_what_involves_the_host_is_noticed() -> None:
    recorder = Recorder(frozenset({"aten::add.Tensor"}))
    tensor = torch.ones(3, device="npu:0")
    with recorder:
        tensor.cpu()  # not while nothing is measured
        recorder.now = Moment("npu", "unsharded", "eval")
        _ = tensor.cpu(), tensor.sum().item(), tensor.nonzero(), tensor + tensor, tensor * 2, torch.ones(2).to("npu:0")
        _ = tensor[tensor > 0], tensor[torch.tensor([0])], tensor.equal(tensor)
        counts = torch.tensor([1, 2, 0], device="npu:0")
        _ = tensor.repeat_interleave(counts), tensor.repeat_interleave(counts, output_size=3)
        recorder.now = None
    assert set(recorder.meetings) == {
        Meeting("aten::_to_copy", COPY, "autograd"),
        Meeting("aten::_local_scalar_dense", COPY, "autograd"),
        Meeting("aten::nonzero", WAITS, "autograd"),
        Meeting("aten::index.Tensor", WAITS, "autograd"),
        Meeting("aten::equal", COPY, "autograd"),
        Meeting("aten::repeat_interleave.self_Tensor", WAITS, "autograd"),
        Meeting("aten::add.Tensor", FALLBACK, "autograd"),
    }
    assert {"aten::mul.Tensor", "aten::sum"} <= recorder.operators


def test_what_runs_on_the_ai_cpu_is_noticed() -> None:
    """By dtypes alone: those on the left have no kernel for AI Cores, those on the right have one."""
    recorder = Recorder(frozenset())
    ids, floats, pairs = (torch.ones(4, dtype=dtype, device="npu:0") for dtype in (torch.int64, torch.float32, None))
    columns = pairs.view(2, 2)[:, 0]
    with recorder:
        recorder.now = Moment("npu", "unsharded", "eval")
        _ = ids.sort(stable=True), floats.sort(stable=True)
        _ = ids.cumsum(0), ids.cumsum(0, dtype=torch.int32)
        _ = ids >> 3, ids & 3
        _ = ids // 3, ids.int() // 3
        _ = torch.frac(floats), columns.copy_(floats[:2]), floats[:2].copy_(ids[:2])
        recorder.now = None
    assert set(recorder.meetings) == {
        Meeting("aten::sort.stable", f"{AI_CPU}int64 -> int64", "autograd"),
        Meeting("aten::cumsum", f"{AI_CPU}int64 -> int64", "autograd"),
        Meeting("aten::__rshift__.Scalar", f"{AI_CPU}int64 -> int64", "autograd"),
        Meeting("aten::floor_divide", f"{AI_CPU}int64 -> int64", "autograd"),
        Meeting("aten::frac", f"{UNKNOWN}float32 -> float32", "autograd"),
        Meeting("aten::copy_", f"{UNKNOWN}float32 -> float32, into a strided view", "autograd"),
    }
    assert not recorder.calls


def test_the_engine_depends_on_the_chip() -> None:
    engines_of_sort = {chip: engine("aten::sort.stable", ["int64"], ["int64", "int64"], chip) for chip in CHIPS}
    assert engines_of_sort == {"910B": engines.AI_CPU, "910_95": engines.AI_CORE, "310P": engines.AI_CPU}
    assert engine("aten::no_such_operator", ["int64"], ["int64"]) == engines.UNKNOWN
    assert engine("aten::view", ["int64"], ["int64"]) == engines.NO_KERNEL


def test_every_operator_of_the_table_exists() -> None:
    for operator in engines.read():
        assert torch._C._dispatch_has_kernel(operator), operator


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(dense_rows=0)], ids=["static", "hashed"])
def test_an_eval_forward_waits_once_to_check_its_batch(hashing: recfx.HashConfig | None) -> None:
    """And for nothing else: rows of raw ids are found on the device."""
    features = batch(4, ("a", "b"), rows=10).to(torch.device("npu:0"))
    recorder = Recorder(frozenset())
    with launching_nothing(), torch.no_grad():
        model = recfx.convert(one_table(("a", "b")), hashing=hashing).to("npu:0").eval()
        model(features)
        with recorder:
            recorder.now = Moment("npu", "unsharded", "eval")
            model(features)
            recorder.now = None
    waits = Counter(element.where for element in recorder.calls.elements())
    assert waits == {"recfx/kernels/lookup/bag_offsets.py": 1}


def test_features_are_selected_without_fbgemm() -> None:
    """Whose operators would be an error here, as TorchRec's own offsets are."""
    features = batch(4, ("a", "b")).to(torch.device("npu:0"))
    permuted = permute_features(features, [1, 0], ["x", "y"])
    assert permuted.lengths().tolist() == [*features.lengths()[4:].tolist(), *features.lengths()[:4].tolist()]
    with pytest.raises(RuntimeError, match="asynchronous_complete_cumsum"):
        features.offsets()
