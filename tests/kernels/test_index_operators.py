"""The index's operators as operators: checked, traced, scripted, exported and compiled."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recfx.kernels.index.index_buffers import flat
from tests.kernels.indexes import NOTHING_IN_FLIGHT, copy_of, empty, insert

KINDS: list[dict[str, Any]] = [
    {"on_full": "share"},
    {"on_full": "evict", "evict": "lru"},
    {"on_full": "evict", "evict": "lfu", "admit_after": 2, "unseen": "share"},
    {"on_full": "evict", "evict": "ttl", "ttl_batches": 1},
]


@pytest.mark.parametrize("config", KINDS)
def test_opcheck(config: dict[str, Any]) -> None:
    index, policy = empty(64, dense_rows=4, buckets=2, **config)
    other = copy_of(index)
    ids = torch.tensor([5, 2, -1, 5, 2**63 - 1])
    insert(ids, index, policy)
    slots, side_rows, locks = [index.slot_groups] * 2, [index.side_row] * 2, [index.lock] * 2
    both, policies = flat([index, other]), flat([policy, policy])
    cases: list[tuple[str, tuple[object, ...]]] = [
        ("find", (ids, index.slot_groups, index.side_row, 4)),
        ("find", (ids, index.slot_groups, index.side_row, 4, index.lock)),
        ("find", (ids, index.slot_groups, index.side_row, 4, index.lock, 7)),
        ("find_tables", (ids, [1, 3], [3, 5], slots, side_rows, locks, [4, 0])),
        ("find_tables", (ids, [1, 3], [3, 5], slots, side_rows, locks, [4, 0], [7, 0])),
        (
            "slot_tables_",
            (
                torch.empty(2 * 128, 2).long(),
                torch.empty(2).long(),
                [128] * 2,
                [index.row_ids] * 2,
                [index.row_state] * 2,
                locks,
            ),
        ),
        ("take_slots_", (torch.zeros(2 * 128, dtype=torch.uint8), [128] * 2, ids[1:], [2, 4])),
        ("find_or_insert", (ids, [0, 3], [3, 5], both, policies, [NOTHING_IN_FLIGHT, 1])),
        ("add_counts", ([index.counts, other.counts], list(range(12)))),
        ("any_nonzero", ([index.lock, index.counts[:1]],)),
        ("any_nonzero", ([index.lock],)),
        ("mark_initialized", (both, policies, torch.tensor([4, 5, 5]), [0, 1], [1, 3])),
        ("erase", (ids[:2], list(index), list(policy))),
        ("rebuild", (list(index), list(policy))),
    ]
    of_policies = ("find_or_insert", "mark_initialized", "erase", "rebuild")
    for name, arguments in cases if config is KINDS[-1] else [case for case in cases if case[0] in of_policies]:
        torch.library.opcheck(getattr(torch.ops.recfx, name).default, arguments)


class _Sizes(TorchDispatchMode):
    """The number of elements of every tensor that an operator gives back, in a graph or outside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.data_ptr() for tensor in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(tensor)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.data_ptr() not in given:
                self.made.append(tensor.numel())
        return result


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("config", KINDS)
def test_compiled_operators_change_the_table_in_place(backend: str, config: dict[str, Any]) -> None:
    """Functionalization would copy every buffer that an operator changes: twice the table, twice a batch."""
    index, policy = empty(5000, **config)
    expected = copy_of(index)
    addresses = [tensor.data_ptr() for tensor in index]

    def step(ids: torch.Tensor) -> torch.Tensor:
        rows, *_ = torch.ops.recfx.find_or_insert(
            ids * 3, [0], [ids.numel()], list(index), list(policy), [NOTHING_IN_FLIGHT]
        )
        return rows + torch.ops.recfx.find(ids, index.slot_groups, index.side_row, 0, index.lock)

    compiled = torch.compile(step, backend=backend)
    compiled(torch.arange(10).repeat(2))
    with _Sizes() as sizes:
        rows = compiled(torch.arange(5, 15).repeat(2))
    for first in (0, 5):
        ids = torch.arange(first, first + 10).repeat(2)
        expected_rows = insert(ids * 3, expected, policy).rows
        expected_rows = expected_rows + torch.ops.recfx.find(ids, expected.slot_groups, expected.side_row, 0)
    assert torch.equal(rows, expected_rows)
    assert torch.equal(index.row_ids, expected.row_ids)
    assert [tensor.data_ptr() for tensor in index] == addresses
    assert max(sizes.made, default=0) < 100
    assert sizes.made or backend == "aot_eager", "nothing was watched"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "ids must have 1 dimension"),
        ({"ids": torch.zeros(2)}, "ids must be int64"),
        ({"slot_groups": torch.full((12, 2), -1)}, r"\[groups, 8\]"),
        ({"row_state": torch.zeros(10, dtype=torch.int8)}, "row_state must be Byte"),
        ({"row_state": torch.zeros(3, dtype=torch.uint8)}, "row_state must have 10 elements"),
        ({"counts": torch.zeros(5, dtype=torch.int64)}, "counts must have 6 elements"),
        ({"victims": torch.zeros(2, 3, dtype=torch.int64)[:0]}, "victims must have 9 elements"),
        ({"candidate_counts": torch.zeros(10, dtype=torch.int64)}, "candidate_counts must be Int"),
        ({"candidate_slot_groups": torch.full((2, 8), -1)}, "more .*slots than rows"),
    ],
)
def test_operators_check_what_they_are_given(change: dict[str, torch.Tensor], message: str) -> None:
    index, policy = empty(10, on_full="evict", admit_after=2)
    change = dict(change)
    ids = change.pop("ids", torch.arange(2))
    with pytest.raises(RuntimeError, match=message):
        insert(ids, index._replace(**change), policy)
    assert index.lock.item() == 0


@pytest.mark.parametrize(
    ("begins", "ends"), [([0], [6]), ([3], [2]), ([-1], [2]), ([0, 1], [1]), ([0, 2], [1, 2]), ([2**62], [2**62 + 1])]
)
def test_stretches_that_do_not_fit_are_refused(begins: list[int], ends: list[int]) -> None:
    index, policy = empty(8)
    with pytest.raises(RuntimeError, match=r"find_tables|has ids"):
        torch.ops.recfx.find_tables(
            torch.arange(5), begins, ends, [index.slot_groups], [index.side_row], [index.lock], [0]
        )
    with pytest.raises(RuntimeError, match=r"find_or_insert|has ids|takes"):
        torch.ops.recfx.find_or_insert(torch.arange(5), begins, ends, list(index), list(policy), [NOTHING_IN_FLIGHT])
    assert index.lock.item() == 0
    assert (index.row_state == 0).all()
