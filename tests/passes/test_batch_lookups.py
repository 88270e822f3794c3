"""Tables that one lookup can serve share one, and columns stay where they belong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrec import KeyedJaggedTensor

from recfx import HashEmbeddingBagCollection
from recfx.passes.batch_lookups import batch_lookups
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection, rewritten, table


def test_hashed_tables_share_one_lookup() -> None:
    _, text, modified, _ = after("batch_lookups", collection(INDEXED, INDEXED))
    assert modified
    assert (
        text
        == """\
features = input
ebc_select_features = select_features(features)
ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[users, ads]}
ebc_lookup = lookup(ebc_hash_ids) {tables=[users, ads], combine=SUM, dtype=float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)
return ebc_keyed_tensor"""
    )


def test_tables_with_different_pooling_do_not() -> None:
    _, text, modified, _ = after("batch_lookups", collection(ADOPTED, ADOPTED))
    assert not modified
    assert text.count(" = lookup(") == 2


def test_columns_keep_the_standard_order_when_groups_are_not_adjacent() -> None:
    converted = HashEmbeddingBagCollection([table(name, ADOPTED, mean=name == "b") for name in "abc"])
    _, text, _, _ = after("batch_lookups", converted)
    assert [line.partition("{tables=[")[2].partition("]")[0] for line in text.splitlines() if "= lookup(" in line] == [
        "a, c",
        "b",
    ]
    kjt = KeyedJaggedTensor(["a", "b", "c"], torch.arange(6), lengths=torch.tensor([2, 2, 2]))
    pooled = converted(kjt)
    assert pooled.keys() == ["a", "b", "c"]
    weights = {name: converted.weight(name) for name in "abc"}
    torch.testing.assert_close(pooled["a"], weights["a"][[0, 1]].sum(0, keepdim=True))
    torch.testing.assert_close(pooled["b"], weights["b"][[2, 3]].mean(0, keepdim=True))
    torch.testing.assert_close(pooled["c"], weights["c"][[4, 5]].sum(0, keepdim=True))


def test_pooled_tables_of_different_widths_share_one_lookup() -> None:
    wide = replace(table("wide", ADOPTED), embedding_dim=8)
    _, text, modified, _ = after("batch_lookups", HashEmbeddingBagCollection([table("narrow", ADOPTED), wide]))
    assert modified
    assert "lookup(ebc_select_features) {tables=[narrow, wide], " in text


@pytest.mark.parametrize(("kernels", "lookups"), [(["reference"] * 2, 1), (["reference", "cpu"], 2)])
def test_kernels_that_passes_have_decided_on_stay(kernels: list[str], lookups: int) -> None:
    graph = rewritten(collection(INDEXED, INDEXED), "insert_hash").graph
    for lookup, kernel in zip(graph.of_kind("lookup"), kernels, strict=True):
        graph.change(lookup, kernel=kernel)
    assert [lookup.kwargs["kernel"] for lookup in batch_lookups(graph).graph.of_kind("lookup")] == kernels[:lookups]
