"""The text of what passes changed, against golden text."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import recfx
from recfx.inspect import diff_steps
from recfx.inspect.step_diff import text_before
from recfx.ir.printer import format_graph
from tests.inspect.models import Wrapped, collection, dlrm
from tests.passes.small_collection import ADOPTED, INDEXED
from tests.passes.small_collection import collection as small_collection

HASHED = """\
--- (root) after expand_collection
+++ (root) after insert_hash
@@ -1,6 +1,8 @@
 features = input
 ebc_select_features = select_features(features)
-ebc_lookup = lookup(ebc_select_features) {tables=[users], combine=MEAN, dtype=float32}
-ebc_lookup_1 = lookup(ebc_select_features) {tables=[ads], combine=SUM, dtype=float32}
-ebc_keyed_tensor = keyed_tensor(ebc_lookup, ebc_lookup_1)
+ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[users, ads]}
+ebc_lookup = lookup(ebc_hash_ids) {tables=[users], combine=SUM, dtype=float32}
+ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
+ebc_lookup_1 = lookup(ebc_hash_ids) {tables=[ads], combine=SUM, dtype=float32}
+ebc_keyed_tensor = keyed_tensor(ebc_mean_divide, ebc_lookup_1)
 return ebc_keyed_tensor
"""

ALL = """\
--- (root) before
+++ (root) after lower
@@ -1,3 +1,6 @@
 features = input
-ebc_collection = collection(features)
-return ebc_collection
+ebc_select_features = select_features(features)
+ebc_lookup = lookup(ebc_select_features) {tables=[users], combine=MEAN, dtype=float32, kernel=cpu}
+ebc_lookup_1 = lookup(ebc_select_features) {tables=[ads], combine=SUM, dtype=float32, kernel=cpu}
+ebc_keyed_tensor = keyed_tensor(ebc_lookup, ebc_lookup_1)
+return ebc_keyed_tensor
"""


def test_the_diff_of_two_steps() -> None:
    assert diff_steps(small_collection(INDEXED, INDEXED), "expand_collection", "insert_hash") == HASHED
    assert diff_steps(small_collection(ADOPTED, ADOPTED), "before", "lower") == ALL


def test_steps_in_the_other_order() -> None:
    forward = diff_steps(small_collection(INDEXED, INDEXED), "expand_collection", "insert_hash").splitlines()[3:]
    backward = diff_steps(small_collection(INDEXED, INDEXED), "insert_hash", "expand_collection").splitlines()[3:]
    assert {line[1:] for line in forward if line[0] == "+"} == {line[1:] for line in backward if line[0] == "-"}


def test_equal_steps_have_no_diff() -> None:
    model = small_collection(INDEXED, INDEXED)
    assert diff_steps(model, "insert_hash", "insert_hash") == ""
    assert diff_steps(model, "before", "before") == ""
    assert diff_steps(model, "expand_collection", "insert_dist") == ""  # it is not sharded


def test_less_context() -> None:
    lines = diff_steps(small_collection(INDEXED, INDEXED), "expand_collection", "insert_hash", context=0).splitlines()
    assert not [line for line in lines if line.startswith(" ")]


@pytest.mark.parametrize("context", [-1, 1.5, "3", None, True])
def test_context_is_a_number_of_lines(context: Any) -> None:
    with pytest.raises(recfx.ConversionError, match="is not a number of lines") as caught:
        diff_steps(small_collection(INDEXED, INDEXED), "before", "lower", context=context)
    assert caught.value.reason == "invalid_argument"


def test_a_collection_that_is_now_part_of_another_model() -> None:
    converted = recfx.convert(nn.ModuleDict({"a": collection()}))
    lines = diff_steps(nn.ModuleDict({"moved": converted}), "before", "lower").splitlines()
    assert lines[:2] == ["--- moved.a before", "+++ moved.a after lower"]
    assert lines[2:] == diff_steps(converted, "before", "lower").splitlines()[2:]


def test_one_section_per_collection() -> None:
    model = recfx.convert(nn.ModuleDict({"one": Wrapped(collection()), "other": Wrapped(collection(1))}))
    titles = [line for line in diff_steps(model, "before", "lower").splitlines() if line.startswith("+++")]
    assert titles == ["+++ one.inner after lower", "+++ other.inner after lower"]


def test_the_text_before_is_that_of_the_graph() -> None:
    converted = recfx.convert(nn.ModuleDict({"a": collection()}))
    assert text_before("a") == format_graph(converted["a"].unexpanded_graph())
    assert text_before("") == format_graph(small_collection(INDEXED, INDEXED).unexpanded_graph())


def test_graphs_and_whole_graphs() -> None:
    model, sample = dlrm()
    whole = recfx.convert(model, sample, verify=False, whole_graph=True)
    expected = diff_steps(recfx.convert(model), "before", "lower")
    assert "+++ sparse_arch.embedding_bag_collection after lower" in expected
    assert diff_steps(whole, "before", "lower") == expected
    assert diff_steps(recfx.trace(model, sample), "before", "lower") == expected
    one = recfx.convert(model).get_submodule("sparse_arch.embedding_bag_collection").graph_module
    assert isinstance(one, nn.Module)
    assert diff_steps(one, "before", "lower") == expected


def test_what_there_is_no_diff_of() -> None:
    with pytest.raises(recfx.ConversionError, match="'lowr'") as caught:
        diff_steps(small_collection(INDEXED, INDEXED), "before", "lowr")
    assert caught.value.reason == "unknown_step"
    assert "expand_collection" in caught.value.what_to_do
    with pytest.raises(recfx.ConversionError) as caught:
        diff_steps(collection(), "before", "lower")
    assert caught.value.reason == "no_collection"
    with pytest.raises(recfx.ConversionError) as caught:
        diff_steps(3, "before", "lower")  # type: ignore[arg-type]
    assert caught.value.reason == "invalid_argument"
