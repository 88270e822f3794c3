"""``HashIds.finder``: rows that are found ahead, and when they are used."""

from collections.abc import Callable

import pytest
import torch
from torchrec import KeyedJaggedTensor

from recfx import HashConfig, HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.runtime.hash_ids import FoundRows, HashIds, HashLookup
from tests.builders.batches import one_bag
from tests.passes.small_collection import INDEXED, collection


def nodes(**config: object) -> tuple[HashEmbeddingBagCollection, HashIds, Callable[[list[int]], FoundRows]]:
    """A collection of one table, its ``hash_ids``, and what finds the rows of a batch."""
    hashing = HashConfig(dense_rows=0, **config)  # type: ignore[arg-type]
    table = HashEmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"], hashing=hashing)
    converted = HashEmbeddingBagCollection([table])
    (hash_ids,) = [module for module in converted.graph_module.modules() if isinstance(module, HashIds)]

    def find(ids: list[int]) -> FoundRows:
        finder = hash_ids.finder()
        assert finder is not None
        found_rows = finder(one_bag(*ids))
        assert isinstance(found_rows, FoundRows)
        return found_rows

    return converted, hash_ids, find


def test_finding_changes_and_counts_nothing() -> None:
    converted, _, find = nodes()
    converted(one_bag(5, 6))
    before = {name: value.clone() for name, value in converted.state_dict().items()}
    found_rows = find([6, 7, 5])
    assert found_rows.rows.tolist() == [1, -1, 0]
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())


def test_what_was_inserted_meanwhile_changes_no_row_that_was_found() -> None:
    converted, hash_ids, find = nodes()
    converted(one_bag(5, 6))
    found_rows = find([6, 7, 5])
    converted(one_bag(9, 7))
    rows = hash_ids(found_rows)
    assert rows.values().tolist() == [1, 3, 0]
    assert converted.index("t").counters["batches"] == 3
    assert converted.index("t").counters["ids_seen"] == 7


@pytest.mark.parametrize(("ids", "rows"), [([7], [2]), ([7, 6], [2, 1]), ([5, 7], [0, 2]), ([6, 5], [1, 0]), ([], [])])
def test_ids_without_a_row_get_one_and_every_batch_counts(ids: list[int], rows: list[int]) -> None:
    converted, hash_ids, find = nodes()
    converted(one_bag(5, 6))
    assert hash_ids(find(ids)).values().tolist() == rows
    counters = converted.index("t").counters
    assert (counters["batches"], counters["ids_seen"], counters["inserted"]) == (2, 2 + len(ids), 2 + ids.count(7))


@pytest.mark.parametrize("change", ["erase", "load", "eval"])
def test_what_is_not_right_any_more_is_hashed_in_turn(change: str) -> None:
    converted, hash_ids, find = nodes()
    converted(one_bag(5, 6))
    saved = {name: value.clone() for name, value in converted.state_dict().items()}
    converted(one_bag(7))
    found_rows = find([7, 6])
    if change == "erase":
        converted.index("t").erase(torch.tensor([7]))
        converted(one_bag(8))  # takes the row
        assert hash_ids(found_rows).values().tolist() == [3, 1]
    elif change == "load":
        converted.load_state_dict(saved)
        converted(one_bag(8))
        assert hash_ids(found_rows).values().tolist() == [3, 1]
    else:
        converted.eval()
        found_rows.rows.fill_(-1)
        assert hash_ids(found_rows).values().tolist() == [2, 1]
        assert converted.index("t").counters["batches"] == 2


@pytest.mark.parametrize(
    ("config", "training", "of_use"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"on_full": "share"}, True, True),
        ({"on_full": "evict"}, True, False),
        ({"admit_after": 2}, True, False),
    ],
)
def test_when_finding_ahead_is_of_use(config: dict[str, object], training: bool, of_use: bool) -> None:
    converted, hash_ids, _ = nodes(**config)
    converted.train(training)
    assert (hash_ids.finder() is not None) is of_use


def test_on_meta_nothing_is_found() -> None:
    converted, hash_ids, _ = nodes()
    finder, features = hash_ids.finder(), one_bag(1, 2).to(torch.device("meta"))
    assert finder is not None
    assert finder(features) is features
    converted.to("meta")
    assert hash_ids.finder() is None


def test_what_is_found_ahead_gives_what_the_fused_node_gives() -> None:
    converted, fused = collection(INDEXED, INDEXED), collection(INDEXED, INDEXED)
    fused.load_state_dict(converted.state_dict())
    two_steps, one_step = (made.graph_module.get_submodule("hash_lookup") for made in (converted, fused))
    assert isinstance(two_steps, HashLookup)
    for ids in ([1, 2, 3, 4], [1, 5, 3, 3], [9, 9, 9, 9]):
        batch = KeyedJaggedTensor(["user", "friend", "ad"], torch.tensor(ids), lengths=torch.tensor([1, 1, 2]))
        finder = two_steps.hash_ids.finder()
        assert finder is not None
        assert torch.equal(two_steps(finder(batch)), one_step(batch))
    counts = [[made.index(name).counters for name in ("users", "ads")] for made in (converted, fused)]
    assert counts[0] == counts[1]
