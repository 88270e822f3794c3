"""Target ``npu``: training that finds rows on the (simulated) device, and what graphs and reports say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection

import recfx
from recfx.ir import format_graph
from recfx.kernels.build import launch
from tests.ascend.finding_on_device import Place
from tests.ascend.inserting_on_device import CASES, finders
from tests.ascend.npu_runtime.training import DEVICE
from tests.builders.batches import batch
from tests.builders.collections import table
from tests.builders.optimizers import attach

# The histories save states before any optimizer has stepped, which recfx warns of.
pytestmark = [
    pytest.mark.usefixtures("simulated_kernels"),
    pytest.mark.filterwarnings("ignore:table .* rows have gone"),
]
ASKED = recfx.HashConfig(dense_rows=0, find_on_device=True)
TABLES = ("t0", "t1")


def converted(first: recfx.HashConfig, second: recfx.HashConfig, device: str = DEVICE, **options: Any) -> Any:
    torch.manual_seed(0)
    plain = EmbeddingBagCollection([table("t0", ["f0"]), table("t1", ["f1"])])
    attach(plain, "adagrad")
    model = nn.Sequential(plain)
    return recfx.convert(model, hashing=dict(zip(TABLES, (first, second), strict=True)), device=device, **options)


def reasons(model: nn.Module) -> dict[str, str]:
    codes = ("found_on_device", "hashed_on_host", "find_on_device_not_used")
    return {reason.code: reason.message for reason in recfx.explain(model).reasons if reason.code in codes}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_on_the_host(case: str) -> None:
    CASES[case](Place(DEVICE))


def test_lookups_of_a_target_that_takes_no_absent_rows() -> None:
    CASES["histories"](Place(DEVICE, "reference"))


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"find_on_device": False}, "tables ['t1'] do not ask for it"),
        ({"on_full": "evict"}, "tables ['t1'] count every id, or evict"),
        ({"admit_after": 2}, "tables ['t1'] count every id, or evict"),
    ],
    ids=str,
)
def test_what_the_host_has_to_decide_it_decides(others: dict[str, Any], why: str) -> None:
    model = converted(ASKED, replace(ASKED, **others))
    messages = reasons(model)
    assert messages.keys() == {"hashed_on_host", "find_on_device_not_used"}
    assert f"find_on_device=True does nothing: {why}" in messages["find_on_device_not_used"]
    (collection,) = recfx.explain(model).collections
    (declined,) = [one for one in collection.declined if one.by == "find_on_device"]
    assert declined.code == "inserted_on_host"
    assert messages["find_on_device_not_used"].endswith(declined.message)
    assert "to_host(" in format_graph(model[0].graph_module)


def test_where_nothing_can_be_found_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = reasons(converted(ASKED, ASKED, "cpu"))
    assert on_host.keys() == {"find_on_device_not_used"}
    assert on_host["find_on_device_not_used"].endswith("its tables are on the host, where the indexes are.")
    shared = converted(ASKED, ASKED)
    for index in shared[0].hash_indexes.values():
        index.share_memory()
    assert "shared memory" in reasons(shared)["find_on_device_not_used"]
    monkeypatch.undo()
    launch.is_possible.cache_clear()
    assert "no target finds rows on npu: " in reasons(converted(ASKED, ASKED))["find_on_device_not_used"]


def test_a_whole_graph_trains_as_the_collection_does() -> None:
    """Also one that was made on the host, which goes on as it is."""
    features = batch(3, ("f0", "f1"))
    outputs = []
    for asked, made_on in ((True, DEVICE), (False, DEVICE), (True, "cpu")):
        config = replace(ASKED, find_on_device=asked)
        whole = converted(config, config, made_on, sample=(features,), whole_graph=True).to(DEVICE)
        assert ("find_rows" in whole.train_graph.code) == (asked and made_on == DEVICE)
        steps = [whole.train(mode)(features.to(torch.device(DEVICE))).values() for mode in (True, False, True)]
        outputs.append(steps)
        assert [whole.get_submodule("0").index(name).counters["batches"] for name in TABLES] == [2, 2]
    for output in outputs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(output, outputs[0], strict=True))


def test_copies_that_another_stream_reads_are_made_again() -> None:
    """It may still read them."""
    collection = converted(ASKED, ASKED)[0]
    (node,) = finders(collection)
    first, second = (batch(samples, ("f0", "f1")).to(torch.device(DEVICE)) for samples in (1, 9))
    collection.train()(first)
    made = node.copies._copy
    assert made is not None
    with torch.no_grad(), torch.npu.stream(torch.npu.Stream()):
        collection.eval()(first)
    assert node.copies._copy is made
    collection.train()(first)
    assert node.copies._copy is made  # nothing was new
    collection(second)
    assert node.copies._copy is None
    collection(second)
    assert node.copies._copy not in (None, made)
