import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.errors import ConversionError
from recfx.hashing import HashConfig
from recfx.hashing.slices import row_cuts
from tests.hashing.strategies import configurations
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 0),
        ("rows", 2.0),
        ("rows", True),
        ("dense_rows", -1),
        ("buckets", 0),
        ("buckets", 2**20 + 1),
        ("on_full", "grow"),
        ("evict", "fifo"),
        ("admit_after", 0),
        ("unseen", "zero"),
        ("seed", 2**63 - 1),
        ("rows", 2**62),
        ("rows", torch.tensor(4)),
        ("evict", 0),
        ("ttl_batches", 0),
        ("ttl_batches", 2**36),
        ("ttl_batches", 5),
    ],
)
def test_bad_value_is_named(field: str, value: Any) -> None:
    with refused("invalid_hash_config") as caught:
        HashConfig(**{field: value})
    assert f"HashConfig.{field} is {value!r}." in str(caught.value)


def test_what_time_to_live_needs_is_said_at_once() -> None:
    with refused("invalid_hash_config"):
        HashConfig.raw_ids(evict="ttl")


def test_more_dense_rows_than_rows() -> None:
    with pytest.raises(ConversionError, match=r"HashConfig\.dense_rows is 5\..*at most 4"):
        HashConfig(rows=4, dense_rows=5)
    with pytest.raises(ConversionError, match=r"\[invalid_hash_config\] t1: HashConfig\.dense_rows is 5\."):
        HashConfig(dense_rows=5).resolve(4, adopt=True, name="t1")


@pytest.mark.parametrize(
    ("config", "adopt", "rows", "dense_rows", "has_index"),
    [
        (HashConfig(), True, 100, 100, False),
        (HashConfig(), False, 100, 0, True),
        (HashConfig(dense_rows=0), True, 100, 0, True),
        (HashConfig(rows=150), True, 150, 100, True),
        (HashConfig(rows=150, dense_rows=10), True, 150, 10, True),
        (HashConfig(rows=100), True, 100, 100, False),
        (HashConfig(dense_rows=100), False, 100, 100, False),
        (HashConfig(buckets=64), True, 100, 100, False),
    ],
)
def test_resolve(config: HashConfig, adopt: bool, rows: int, dense_rows: int, has_index: bool) -> None:
    resolved = config.resolve(100, adopt)
    assert (resolved.rows, resolved.dense_rows, resolved.has_index) == (rows, dense_rows, has_index)
    assert resolved.index_rows == rows - dense_rows


def test_a_table_cannot_shrink() -> None:
    with refused("rows_shrink") as caught:
        HashConfig(rows=99).resolve(100, adopt=True, name="t1")
    assert caught.value.module_path == "t1"
    assert HashConfig(rows=99).resolve(100, adopt=False).rows == 99
    with refused("invalid_hash_config", "t1", match="the table has no rows"):
        HashConfig().resolve(0, adopt=True, name="t1")


@pytest.mark.parametrize(
    ("index_rows", "buckets"),
    [(1, 1), (4096, 1), (8191, 1), (8192, 2), (16384, 4), (64 * 4096 - 1, 32), (64 * 4096, 64), (20_000_000, 64)],
)
def test_default_buckets_hold_4096_rows(index_rows: int, buckets: int) -> None:
    assert HashConfig(dense_rows=7).resolve(index_rows + 7, adopt=True).buckets == buckets


def test_more_buckets_than_rows() -> None:
    for config, rows in (
        (HashConfig.raw_ids(buckets=4), 3),
        (HashConfig(buckets=4, dense_rows=2), 5),
        (HashConfig(buckets=2, dense_rows=2, unseen="row"), 5),
        (HashConfig.raw_ids(unseen="row"), 1),
    ):
        with refused("invalid_hash_config", "t1", match=r"HashConfig\.buckets"):
            config.resolve(rows, adopt=True, name="t1")


@given(configurations(), st.integers(1, 80))
def test_cuts(rows_and_config: tuple[int, HashConfig], pieces: int) -> None:
    rows, config = rows_and_config
    resolved = config.resolve(rows, False)
    cuts = row_cuts(resolved, pieces)
    assert (len(cuts), cuts[0], cuts[-1]) == (pieces + 1, 0, rows)
    assert cuts == sorted(cuts)
    policy = resolved.policy
    borders = [row for row in range(rows + 1) if policy.may_be_border(row)]
    begins = [policy.rows_of(bucket).start for bucket in range(resolved.buckets)]
    assert borders == sorted({*range(resolved.dense_rows + 1), *begins, rows})
    for piece, cut in enumerate(cuts):
        assert cut == max(row for row in borders if row <= piece * rows // pieces)


def test_raw_ids() -> None:
    assert HashConfig.raw_ids() == HashConfig(dense_rows=0)
    assert HashConfig.raw_ids(on_full="share", rows=7) == HashConfig(dense_rows=0, on_full="share", rows=7)
    of_class, of_raw_ids = (inspect.signature(made).parameters for made in (HashConfig, HashConfig.raw_ids))
    assert {name: one.default for name, one in of_class.items() if name != "dense_rows"} == {
        name: one.default for name, one in of_raw_ids.items()
    }
    changed = {"rows": 5, "buckets": 2, "on_full": "evict", "evict": "ttl", "admit_after": 2, "unseen": "row"}
    changed |= {"seed": 3, "ttl_batches": 9}
    assert changed.keys() == of_raw_ids.keys()
    assert HashConfig.raw_ids(**changed) == HashConfig(dense_rows=0, **changed)  # type: ignore[arg-type]
