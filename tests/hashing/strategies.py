"""Ids and configs for random tests of indexes; states of indexes, as tests compare, damage and load them."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from recfx.errors import CheckpointError
from recfx.hashing import HashConfig, HashIndex
from tests.support.refusals import refused

State = dict[str, Any]
"""The ``state_dict`` of an index; tests also put things into it that are no tensors."""

EXTREMES = [-(2**63), 2**63 - 1, -1, 2**32, -2]
IDS = st.one_of(st.integers(-5, 60), st.integers(-(2**63), 2**63 - 1), st.sampled_from(EXTREMES))


# Few different ids, so that a table is full soon and its ids come back.
CROWD = st.builds(
    lambda first, count, stride: [(first + i * stride) % 60 - 5 for i in range(count)],
    st.integers(0, 60), st.integers(4, 40), st.sampled_from([1, 7, 0, 3]),
)  # fmt: skip


@st.composite
def configurations(draw: st.DrawFn) -> tuple[int, HashConfig]:
    index_rows, dense_rows = draw(st.one_of(st.integers(1, 12), st.integers(1, 60))), draw(st.sampled_from([0, 0, 3]))
    unseen = draw(st.sampled_from(["zeros", "share", "row"]))
    index_rows = max(index_rows, 2) if unseen == "row" else index_rows
    ttl = draw(st.sampled_from([None, None, 1, 2, 4]))
    config = HashConfig(
        dense_rows=dense_rows,
        buckets=min(draw(st.integers(1, 4)), index_rows // 2 if unseen == "row" else index_rows),
        on_full="evict" if ttl else draw(st.sampled_from(["error", "share", "evict"])),
        evict="ttl" if ttl else draw(st.sampled_from(["lru", "lfu"])),
        ttl_batches=ttl,
        admit_after=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        unseen=unseen,
        seed=draw(st.sampled_from([0, 1, 2**63 - 2, -(2**63)])),
    )
    return index_rows + dense_rows, config


def state_of(index: HashIndex) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in index.state_dict().items()}


def change(key: str, value: Any) -> Callable[[State], None]:
    """Put ``value``, or what it returns for the one that is there, in the place of a tensor of a state."""

    def apply(state: State) -> None:
        state[key] = value(state[key]) if callable(value) else value

    return apply


def put(key: str, place: int, value: int) -> Callable[[State], None]:
    """Write one number of a tensor of a state."""

    def apply(state: State) -> None:
        state[key][place] = value

    return apply


def assert_refused(index: HashIndex, state: State, reason: str) -> None:
    """Loading the state raises, names the table, and changes nothing."""
    before = {key: tensor.clone() for key, tensor in index._buffers.items() if tensor is not None}
    with refused(reason, index.name, error=CheckpointError):
        nn.Sequential(index).load_state_dict({f"0.{key}": value for key, value in state.items()})
    for key, tensor in before.items():
        assert torch.equal(tensor, index.get_buffer(key)), key
