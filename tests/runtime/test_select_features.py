"""``select_features``: keys in the collection's order; ids in range; inverse indices; what may be sent."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from recfx.errors import IdRangeError, InputError, MissingFeatureError
from recfx.runtime.select_features import SelectFeatures
from tests.builders.batches import bags
from tests.builders.collections import one_table
from tests.support.refusals import refused

IDS = {"a": [1, 2], "b": [3], "c": [0, 4, 5], "unused": [99, 98]}


def batch(keys: str | list[str]) -> KeyedJaggedTensor:
    """One sample; each feature has the same ids whatever the order."""
    return bags({key: [IDS[key]] for key in keys})


def test_ever_new_orders_do_not_pile_up() -> None:
    """Neither here nor in what is kept per order; one that keeps coming is worked out once."""
    node = SelectFeatures("", recfx.convert(_two()).tables, False)
    usual = ["a", "b"]
    node(batch(usual))
    (worked_out,) = node._orders.values()
    for number in range(100):
        excess = [f"excess_{number}", "b", "a"]
        values = torch.tensor([7, *IDS["b"], *IDS["a"]])
        assert node(KeyedJaggedTensor(excess, values, lengths=torch.tensor([1, 1, 2]))).values().tolist() == [1, 2, 3]
        assert node(batch(usual)).values().tolist() == [1, 2, 3]
    assert len(node._orders) == 16
    assert node._orders[tuple(usual)] is worked_out


def _two() -> EmbeddingBagCollection:
    return one_table(["a", "b"])


# What leaves the node


def node_of(*tables: tuple[str, list[str], int], is_weighted: bool = False, **hashing: Any) -> SelectFeatures:
    """Of tables by name, features and rows, adopted unless ``hashing`` says otherwise."""
    configs = [
        EmbeddingBagConfig(name=n, num_embeddings=max(r, 1), embedding_dim=4, feature_names=f) for n, f, r in tables
    ]
    specs = recfx.convert(EmbeddingBagCollection(configs), hashing=recfx.HashConfig(**hashing)).tables
    return SelectFeatures(
        "ebc",
        tuple(replace(spec, num_embeddings=rows) for spec, (_, _, rows) in zip(specs, tables, strict=True)),
        is_weighted,
    )


def test_a_feature_of_several_tables_has_the_name_of_each() -> None:
    node = node_of(("t", ["a"], 10), ("u", ["a"], 10))
    selected = node(bags({"a": [[1, 2], [3]]}))
    assert selected.keys() == ["a@t", "a@u"]
    assert (selected.values().tolist(), selected.lengths().tolist()) == ([1, 2, 3] * 2, [2, 1] * 2)
    single = node_of(("t", ["a"], 10), ("u", ["b"], 10))
    assert single(bags({"a": [[1]], "b": [[2]]})).keys() == ["a", "b"]


def test_inverse_indices_expand_features_of_one_batch_size_too() -> None:
    node = node_of(("t", ["a", "b"], 10))
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 0, 1, 1]),
        inverse_indices=(["a", "b"], torch.tensor([[1, 0, 0], [0, 0, 1]])),
    )
    selected = node(kjt)
    assert (selected.values().tolist(), selected.lengths().tolist()) == ([1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("rows", "ids", "wrong", "table"),
    [
        ((5, 8), [4, 4], None, ""),
        ((5, 8), [4, 5], 5, "t"),
        ((8, 5), [4, 5], 5, "u"),
        ((8, 5), [4, 8], 8, "t"),
        ((8, 5), [-1, 3], -1, "t"),
        ((0, 5), [0], 0, "t"),
        ((5, 0), [0], 0, "u"),
    ],
)
def test_an_id_must_be_a_row_of_every_table_that_its_feature_reads(
    rows: tuple[int, int], ids: list[int], wrong: int | None, table: str
) -> None:
    node = node_of(("t", ["a"], rows[0]), ("u", ["b", "a"], rows[1]))
    batch = bags({"unused": [[99, -5]], "b": [[]], "a": [ids]})
    if wrong is None:
        assert node(batch).values().tolist() == ids * 2
        return
    with pytest.raises(IdRangeError) as caught:
        node(batch)
    limit = dict(zip("tu", rows, strict=True))[table] - 1
    assert f"id {wrong} of feature 'a' is out of range for table '{table}', whose rows are 0 to {limit}." in str(
        caught.value
    )
    assert (caught.value.reason, caught.value.module_path) == ("id_out_of_range", "ebc")
    assert "HashConfig.raw_ids()" in caught.value.what_to_do


def test_any_id_is_a_row_where_there_is_an_index() -> None:
    ids = [2**62, -(2**62), 0, 1]
    assert node_of(("t", ["a"], 2), dense_rows=0)(bags({"a": [ids]})).values().tolist() == ids


@pytest.mark.parametrize(("present", "words"), [("b", "feature 'a' and 1 more; it"), ("bc", "feature 'a'; it")])
def test_features_that_are_missing(present: str, words: str) -> None:
    node = node_of(("t", ["a", "b"], 10), ("u", ["c"], 10))
    with refused("missing_feature", "ebc", match=words, error=MissingFeatureError):
        node(bags({key: [[1]] for key in present}))


# What is sent to other ranks


def small(weights: bool = False, requires_grad: bool = False) -> KeyedJaggedTensor:
    scale = torch.ones(2, dtype=torch.float64, requires_grad=requires_grad) if weights else None
    return KeyedJaggedTensor(["a"], torch.tensor([1, 2], dtype=torch.int32), scale, lengths=torch.tensor([2]).int())


def test_what_stays_on_its_rank_keeps_its_type() -> None:
    selected = node_of(("t", ["a"], 10), is_weighted=True)(small(weights=True))
    dtypes = selected.values().dtype, selected.lengths().dtype, selected.weights().dtype
    assert dtypes == (torch.int32, torch.int32, torch.float64)


def test_a_batch_on_meta_is_not_sent() -> None:
    node = node_of(("t", ["a"], 10))
    meta = small().to(torch.device("meta"))
    assert node(meta).values().is_meta
    node.prepare_to_send(1, on_host=True)
    with refused("several_devices", "ebc", match="no ids to send", error=recfx.InputError):
        node(meta)


@pytest.mark.parametrize(
    ("world_size", "is_weighted", "requires_grad", "grad_mode", "is_refused"),
    [
        (2, True, True, True, True),
        (1, True, True, True, False),
        (2, False, True, True, False),
        (2, True, False, True, False),
        (2, True, True, False, False),
    ],
)
def test_weights_that_other_ranks_would_send_no_gradient_for(
    world_size: int, is_weighted: bool, requires_grad: bool, grad_mode: bool, is_refused: bool
) -> None:
    node = node_of(("t", ["a"], 10), is_weighted=is_weighted)
    node.prepare_to_send(world_size, on_host=True)
    with torch.set_grad_enabled(grad_mode):
        if not is_refused:
            assert node(small(True, requires_grad)).values().tolist() == [1, 2]
            return
        with pytest.raises(recfx.InputError) as caught:
            node(small(True, requires_grad))
    assert (caught.value.reason, caught.value.module_path) == ("weights_require_grad", "ebc")


CHECKS = SelectFeatures("ebc", recfx.convert(one_table(["a", "b"])).tables, is_weighted=False)
FEATURES = ["b@t", "a"]
SIZES = [3, 2]  # of b and a
CPU = torch.device("cpu")
NAMES = ["a", "x", "b"]
GOOD = torch.tensor([[0, 1, 1, 0], [7, 7, 7, 7], [2, 1, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_rows_are_selected_by_name(dtype: torch.dtype, default: str) -> None:
    indices = GOOD.to(dtype)
    with torch.device(default):
        inverse = CHECKS.inverse_indices((NAMES, indices), FEATURES, SIZES, CPU)
    assert (inverse.dtype, inverse.device.type) == (torch.int64, "cpu")
    assert inverse.tolist() == [[2, 1, 0, 0], [0, 1, 1, 0]]


@pytest.mark.parametrize("named", [None, (NAMES, GOOD[:, :0]), (NAMES, torch.empty(3, 0))])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_without_any_every_sample_is_a_bag(named: Any, default: str) -> None:
    with torch.device(default):
        inverse = CHECKS.inverse_indices(named, FEATURES, [3, 3], CPU)
    assert inverse.tolist() == [[0, 1, 2], [0, 1, 2]]
    with pytest.raises(InputError, match="there are no inverse indices") as caught:
        CHECKS.inverse_indices(named, FEATURES, SIZES, CPU)
    assert caught.value.reason == "variable_batch_without_inverse_indices"
    assert caught.value.module_path == "ebc"
    assert "inverse_indices=" in caught.value.what_to_do


def test_of_a_batch_on_meta_nothing_is_read() -> None:
    meta = torch.device("meta")
    inverse = CHECKS.inverse_indices((NAMES, GOOD + 100), FEATURES, SIZES, meta)
    assert (inverse.device, tuple(inverse.shape), inverse.dtype) == (meta, (2, 4), torch.int64)
    assert CHECKS.inverse_indices(None, FEATURES, [3, 3], meta).device == meta


def test_every_limit_is_that_of_its_own_feature() -> None:
    """Of the bags of `b`, index 2 is the last; `a` has two."""
    assert CHECKS.inverse_indices((["b", "a"], torch.tensor([[2], [1]])), FEATURES, SIZES, CPU).tolist() == [[2], [1]]
