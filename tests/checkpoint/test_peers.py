"""What other ranks are told of an error."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import recfx
from recfx.checkpoint.directory import cause_of
from recfx.checkpoint.peers import Peers, _as_sent


def wrapped(error: BaseException) -> CheckpointException:
    """As ``torch.distributed.checkpoint`` wraps it."""
    return CheckpointException("write", {1: (error, None)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PermissionError("not yours"), OSError, "rank 3: not yours"),
        (wrapped(PermissionError("not yours")), OSError, "rank 3: not yours"),
        (wrapped(wrapped(ValueError("odd"))), OSError, "rank 3: odd"),
        (ValueError("odd"), recfx.CheckpointError, "rank 3 failed: ValueError: odd"),
        (KeyboardInterrupt("now"), recfx.CheckpointError, "rank 3 failed: KeyboardInterrupt: now"),
        (wrapped(KeyboardInterrupt()), recfx.CheckpointError, "rank 3 failed: CheckpointException"),
    ],
)
def test_an_error_of_another_rank(error: BaseException, kind: type, message: str) -> None:
    sent = _as_sent(error, 3)
    assert type(sent) is kind
    assert message in str(sent)
    assert not isinstance(sent, recfx.CheckpointError) or sent.reason == "other_rank_failed"


def test_errors_of_recfx_are_sent_as_they_are() -> None:
    error = recfx.CheckpointError("damaged", reason="checkpoint_torn", what_to_do="")
    assert _as_sent(error, 3) is error


def test_what_is_wrapped() -> None:
    error = OSError("full")
    assert cause_of(error) is error
    assert cause_of(wrapped(wrapped(error))) is error
    assert isinstance(cause_of(CheckpointException("read", {})), RuntimeError)


def test_a_process_alone() -> None:
    peers = Peers.of(nn.Linear(1, 1), "save_checkpoint")
    assert (peers.group, peers.is_first) == (None, True)
    assert peers.agree(lambda: 5) == [5]
    assert peers.first(lambda: 5) == 5
    with pytest.raises(ValueError, match="odd"):
        peers.agree(lambda: int("odd"))
