"""Where lowered graphs leave the AI Cores of an NPU is what ``host_round_trips.md`` says, and nothing else."""

import pytest
import torch

from tests.ascend import tools
from tests.ascend.npu_runtime import round_trips
from tests.ascend.npu_runtime.coverage import measure
from tests.ascend.npu_runtime.recorder import served_by
from tests.ascend.npu_runtime.round_trips import AI_CPU, UNKNOWN

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
    assert not [meeting for meeting in slow if "npu" in round_trips.read()[meeting].occasion.target]


def test_an_operator_without_a_kernel_is_an_error_here() -> None:
    """Unless it is listed. So nothing in these tests runs on the host unseen, not even inside another operator."""
    assert served_by("aten::segment_reduce") == "backend fallback"
    with pytest.raises(RuntimeError, match="segment_reduce"):
        torch.segment_reduce(torch.ones(3, device="npu:0"), "sum", lengths=torch.tensor([1, 2], device="npu:0"))
