"""find_on_device: nothing changes where rows are found on the host anyway; where no target finds them, it says why.

The graphs of collections on a device are in ``tests/ascend/npu_runtime/test_find_rows.py``.
"""

from __future__ import annotations

import copy

import pytest

from recfx.collections.compile_graph import make_eval_graph
from recfx.ir import format_graph
from recfx.ir.context import CollectionContext
from recfx.kernels.build import launch
from recfx.runtime.lowered import Runtime
from tests.passes.small_collection import ADOPTED, INDEXED, collection, lowered, until


@pytest.mark.parametrize("hashing", [(INDEXED, INDEXED), (ADOPTED, INDEXED), (ADOPTED, ADOPTED)])
def test_tables_on_the_host(hashing: tuple[object, object]) -> None:
    converted = collection(*hashing)  # type: ignore[arg-type]
    graph_module = lowered(converted, until("lower"))
    text = format_graph(graph_module)
    assert make_eval_graph(graph_module, Runtime(converted.store)) == (graph_module, [])
    assert format_graph(graph_module) == text
    assert converted.eval().graph_module is converted.train().graph_module


def test_a_device_without_a_kernel_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host were another device, to which rows have to be copied."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(CollectionContext, "copies_ids", property(lambda _: True))
    converted = copy.deepcopy(collection(INDEXED, ADOPTED))
    graph_module = lowered(converted, until("insert_hash"))
    same, (record,) = make_eval_graph(graph_module, Runtime(converted.store))
    assert same is graph_module
    (declined,) = record.declined
    assert (record.name, declined.code, declined.by) == ("find_on_device", "found_on_host", "find_on_device")
    assert launch.why_not(converted.weight("ads").device) in declined.message
