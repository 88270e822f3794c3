"""``HashIndex`` as a module: errors, counters, policies, moving, copying."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recfx.errors import ConversionError, IdTypeError, InputError, TableFullError, type_of
from recfx.hashing import HashConfig, HashIndex
from tests.support.refusals import refused


def filled(rows: int = 40, **config: object) -> HashIndex:
    index = HashIndex(rows, config=HashConfig(**config))  # type: ignore[arg-type]
    index.insert(torch.tensor([70, -1, 2**63 - 1, 70, 5]))
    return index


def assert_equal(left: HashIndex, right: HashIndex) -> None:
    for a, b in zip(left.items(), right.items(), strict=True):
        assert torch.equal(a, b)
    ids = torch.tensor([70, -1, 71, 5])
    assert torch.equal(left.find(ids), right.find(ids))


def test_full_error_names_everything_and_changes_nothing() -> None:
    index = HashIndex(10, config=HashConfig(buckets=2), name="t1")
    index.insert(torch.tensor([3, -1]))
    before = {key: value.clone() for key, value in index._buffers.items() if value is not None}
    with refused("table_full", error=TableFullError) as caught:
        index.insert(torch.arange(50))
    assert caught.value.module_path == "t1"
    assert "t1: bucket " in str(caught.value)
    assert re.search(
        r"more new ids for it than the [345] of its 5 rows that are free \(2 of .* 10 rows", str(caught.value)
    )
    assert "save_checkpoint()" in caught.value.what_to_do
    for key, value in before.items():
        assert torch.equal(value, index._buffers[key]), key  # type: ignore[arg-type]
    assert index.insert(torch.tensor([3]))[1].numel() == 0


@pytest.mark.parametrize("config", [HashConfig(dense_rows=10), HashConfig(rows=11), HashConfig(buckets=11)])
def test_refused_configurations(config: HashConfig) -> None:
    with refused("invalid_hash_config") as caught:
        HashIndex(10, config=config, name="t1")
    assert caught.value.module_path == "t1"
    assert caught.value.what_to_do


def counters(index: HashIndex, **expected: int) -> None:
    assert index.counters == {**dict.fromkeys(index.counters, 0), **expected}


def test_what_training_counts_is_saved_and_what_eval_counts_is_not() -> None:
    index = HashIndex(4, config=HashConfig(on_full="evict"))
    index.insert(torch.arange(4))
    index.insert(torch.arange(8, 10))
    index.answer(torch.tensor([0, 8, 100]))
    counters(index, batches=2, ids_seen=9, inserted=6, evicted=2, unseen_answers=2)
    loaded = HashIndex(4, config=HashConfig(on_full="evict"))
    loaded.load_state_dict(index.state_dict())
    counters(loaded, batches=2, ids_seen=6, inserted=6, evicted=2)


def test_occupancy_finds_the_worst_bucket() -> None:
    index = HashIndex(10, config=HashConfig(buckets=3))  # buckets of 3, 3 and 4 rows
    assert [len(index.policy.rows_of(bucket)) for bucket in range(3)] == [3, 3, 4]
    for id_ in range(100):
        index.insert(torch.tensor([id_]))
        occupancy = index.occupancy()
        fill = [int(taken) / rows for taken, rows in zip(index.bucket_taken, (3, 3, 4), strict=True)]
        assert occupancy.worst_bucket == fill.index(max(fill))
        assert occupancy.worst_bucket_taken == index.bucket_taken[occupancy.worst_bucket]
        assert occupancy.worst_bucket_rows == (3, 3, 4)[occupancy.worst_bucket]
        assert (occupancy.taken, occupancy.rows) == (id_ + 1, 10)
        if max(fill) == 1:
            break
    else:
        pytest.fail("no bucket of three rows filled up with a hundred ids")


def test_stays_on_the_cpu_and_keeps_its_types() -> None:
    index = filled()
    expected = copy.deepcopy(index)
    model = nn.Sequential(nn.Linear(2, 2), index)
    tensors = dict(index._buffers)
    for move in (
        lambda: model.half(),
        lambda: model.to(torch.bfloat16),
        lambda: model.double(),
        lambda: model.to("cpu"),
        lambda: model.type(torch.float32),
        lambda: model.share_memory(),
    ):
        move()
        assert_equal(index, expected)
        assert all(index._buffers[key] is tensor for key, tensor in tensors.items())
    assert index.slot_groups.is_shared()
    assert index.row_state.dtype == torch.uint8


def test_stays_on_the_cpu_when_the_rest_moves_away() -> None:
    """Stands for .to("cuda"): whatever device the function answers on, the index is not copied there."""
    index = filled()
    sizes = []

    def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor.clone()

    index._apply(elsewhere)
    assert_equal(index, filled())
    assert max(sizes) < 100


def test_meta() -> None:
    with torch.device("meta"):
        index = HashIndex(10**9, config=HashConfig(buckets=64))
    assert all(tensor is not None and tensor.is_meta for tensor in index._buffers.values())
    ids, on_meta = torch.tensor([1, 2, 3]), torch.empty(3, dtype=torch.int64, device="meta")
    assert index.find(on_meta).shape == index.answer(on_meta).shape == index.erase(on_meta).shape == (3,)
    assert index.insert(on_meta)[0].is_meta
    assert HashIndex(4, device="meta").slot_groups.is_meta

    index = HashIndex(40, device=torch.device("meta"))
    assert nn.Sequential(index).to_empty(device="cpu")[0] is index
    assert_equal(index, HashIndex(40))
    index.insert(ids)
    assert len(index) == 3
    assert index.insert(torch.tensor([4], device="meta"))[0].is_meta

    index.to_empty(device="meta")
    assert index.slot_groups.is_meta
    index.to_empty(device="cpu")
    assert len(index) == 0
    assert index.insert(ids)[0].tolist() == [0, 1, 2]


def test_to_empty_on_a_real_index_empties_it() -> None:
    for _ in range(20):  # memory is reused: what to_empty() allocates may hold what an earlier call wrote
        index = filled()
        index.to_empty(device="cpu")
        assert_equal(index, HashIndex(40))
        assert index.counters["inserted"] == 0


@pytest.mark.parametrize("default_device", ["meta", "cpu"])
def test_works_under_another_default_device(default_device: str) -> None:
    index = filled()
    ids = torch.tensor([70, 9])
    with torch.device(default_device):
        assert index.insert(ids)[0].tolist() == [0, 4]
        assert index.answer(ids).tolist() == [0, 4]
        index.insert(torch.tensor([10, 11], device="cpu"))
        index.erase(ids)
    assert len(index) == 5


@pytest.mark.parametrize(("name", "garbage"), [("slot_groups", 10**9), ("slot_groups", 0), ("side_row", 10**9)])
@pytest.mark.parametrize("use", [HashIndex.find, HashIndex.answer, HashIndex.find_or_insert, HashIndex.erase])
def test_what_is_derived_may_be_written_over(
    name: str, garbage: int, use: Callable[[HashIndex, torch.Tensor], torch.Tensor]
) -> None:
    """By whoever writes to all buffers of a model, say: operators would follow it out of bounds, or for ever."""
    index, ids = filled(), torch.tensor([70, -1])
    index.insert(ids)
    rows = index.find(ids)
    index.get_buffer(name).fill_(garbage)
    assert torch.equal(use(index, ids), rows)


def test_torch_compile_keeps_the_operators_whole() -> None:
    index = filled(unseen="share")
    compiled = torch.compile(index.answer, fullgraph=True, backend="eager")
    ids, twin = torch.tensor([70, 71, -1]), copy.deepcopy(index)
    assert torch.equal(compiled(ids), twin.answer(ids))
    assert index.counters == twin.counters
    training = torch.compile(index.insert, backend="eager")
    assert training(torch.tensor([1000, 70]))[0].tolist() == [4, 0]
    assert len(index) == 5


@pytest.mark.parametrize("method", ["find", "answer", "insert", "find_or_insert", "erase"])
def test_index_on_meta_has_no_rows_for_ids(method: str) -> None:
    index = HashIndex(40, config=HashConfig(on_full="evict", admit_after=2), device="meta")
    with pytest.raises(InputError, match=r"\[index_on_meta\] table: .*to_empty"):
        getattr(index, method)(torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("method", ["find", "answer", "insert", "find_or_insert", "erase"])
@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (None, "wrong_id_dtype"),
        (torch.tensor([1.0]), "wrong_id_dtype"),
        (torch.tensor([1], dtype=torch.int16), "wrong_id_dtype"),
        (torch.tensor([[1], [2]]), "wrong_id_shape"),
        (torch.tensor(1), "wrong_id_shape"),
        (torch.tensor([0, 5]).to_sparse(), "wrong_id_layout"),
    ],
    ids=str,
)
def test_what_are_no_ids_is_refused(method: str, ids: Any, reason: str) -> None:
    index = filled()
    with pytest.raises(IdTypeError if reason == "wrong_id_dtype" else InputError) as caught:
        getattr(index, method)(ids)
    assert (caught.value.reason, caught.value.module_path, bool(caught.value.what_to_do)) == (reason, index.name, True)
    assert_equal(index, filled())


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": 0},
        {"rows": "a"},
        {"rows": True},
        {"rows": 2**62},
        {"config": None},
        {"name": None},
        {"row_begin": None},
        {"row_end": 1.5},
    ],
    ids=str,
)
def test_arguments_of_wrong_type(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConversionError) as caught:
        HashIndex(**{"rows": 4, **arguments})
    (argument, value) = next(iter(arguments.items()))
    wrong_kind = argument in ("config", "name")
    assert caught.value.reason == ("invalid_argument" if wrong_kind else "invalid_hash_config")
    assert argument in caught.value.message
    assert (type_of(value) if wrong_kind else repr(value)) in caught.value.message
