"""Passes are frozen plain data: what nodes work on comes with the graph."""

from __future__ import annotations

import dataclasses

import pytest

from recfx.ir import GraphVerificationError
from recfx.ir.shards import CollectionSharding
from recfx.nodes import Lookup
from recfx.passes import passes, run_passes
from tests.passes.small_collection import ADOPTED, INDEXED, collection

PLAIN = (str, int, float, bool, CollectionSharding, type(None))


def test_the_options_of_passes_are_plain_frozen_data() -> None:
    for rewrite in passes("auto", CollectionSharding((), 0, 1)):
        assert dataclasses.is_dataclass(rewrite)
        assert isinstance(hash(rewrite), int)
        assert all(isinstance(getattr(rewrite, each.name), PLAIN) for each in dataclasses.fields(rewrite))


def test_one_list_of_passes_serves_several_collections() -> None:
    pipeline = passes()
    stores = []
    for converted in (collection(INDEXED, INDEXED), collection(ADOPTED, INDEXED)):
        graph_module = converted.unexpanded_graph()
        run_passes(graph_module, pipeline)
        stores.append((next(m.store for m in graph_module.modules() if isinstance(m, Lookup)), converted._store))
    assert all(mine is own for mine, own in stores)
    assert stores[0][0] is not stores[1][0]


def test_a_plan_without_process_groups_is_a_bug_that_is_named() -> None:
    with pytest.raises(GraphVerificationError, match="has no process groups"):
        run_passes(collection(ADOPTED, ADOPTED).unexpanded_graph(), passes("auto", CollectionSharding((), 0, 1)))
