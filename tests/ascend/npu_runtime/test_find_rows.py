"""Target ``npu`` in eval mode: rows are found on the (simulated) device, which the host does not wait for."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.ir import format_graph
from recfx.ir.meta import node_meta
from recfx.kernels.build import launch
from tests.ascend.finding_on_device import CASES, HASHING, Pair, Place
from tests.ascend.npu_runtime.training import DEVICE
from tests.builders.batches import bags, batch
from tests.builders.collections import table
from tests.builders.optimizers import attach

pytestmark = pytest.mark.usefixtures("simulated_kernels", "form")


@pytest.mark.parametrize("case", CASES)
def test_as_on_the_host(case: str) -> None:
    CASES[case](Place(DEVICE))


def test_lookups_of_a_target_that_takes_no_absent_rows() -> None:
    """Ids that read nothing are taken out of their bags first."""
    for case in ("policies", "evicted", "empty"):
        CASES[case](Place(DEVICE, "reference"))
    pair = Pair(Place(DEVICE, "reference"), HASHING["zeros"])
    pair.train(0)
    pair.compare()
    text = format_graph(pair.there.graph_module)
    assert ("operators=npu" in text, "kernel=reference" in text) == (True, True)
    assert pair.there.graph_module.find_rows.leaves_out_absent
    assert not Pair(Place(DEVICE), HASHING["zeros"]).there.eval().graph_module.find_rows.leaves_out_absent
    assert not Pair(Place(DEVICE, "reference"), HASHING["share"]).there.eval().graph_module.find_rows.leaves_out_absent


def test_each_mode_has_its_graph(form: str) -> None:
    there = Pair(Place(DEVICE), HASHING["evict"]).there
    trained = format_graph(there.graph_module)
    assert [line.split(" ")[0] for line in trained.splitlines()[2:5]] == [
        "ebc_to_host",
        "ebc_hash_ids",
        "ebc_rows",
    ]
    assert "hashed_in_turn" in {declined.code for record in there.pass_records for declined in record.declined}
    assert "to_host" not in format_graph(there.eval().graph_module)
    assert format_graph(there.train().graph_module) == trained


def test_one_graph_for_both_modes_if_no_table_counts_every_id(form: str) -> None:
    there = Pair(Place(DEVICE), HASHING["zeros"]).there
    graph_module = there.graph_module
    assert there.eval().graph_module is graph_module
    assert (
        format_graph(there.graph_module).replace(f"'{form}'", "npu")
        == """\
features = input
ebc_select_features = select_features(features)
ebc_find_rows = find_rows(ebc_select_features) {hashed=[t0, t1, t2], operators=npu}
ebc_lookup = lookup(ebc_find_rows) {tables=[t0, t1, t2], combine=SUM, dtype=float32, optimizer=adagrad, kernel=npu}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[t1]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)
return ebc_keyed_tensor"""
    )
    metas = [node_meta(node) for node in there.graph_module.graph.nodes]
    (find_node,) = [meta for meta in metas if meta is not None and meta.kind == "find_rows"]
    assert (str(find_node.bytes), find_node.device, find_node.made_by) == (
        "8*B*(L_f0 + L_f1 + L_f2 + L_f3)",
        "npu",
        "find_on_device",
    )
    assert "to_host" not in format_graph(there.cpu().graph_module)


def reason(model: nn.Module) -> str:
    (hashed_on_host,) = [warning for warning in recfx.explain(model).reasons if warning.code == "hashed_on_host"]
    return hashed_on_host.message


def test_the_report_says_where_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Pair(Place(DEVICE), HASHING["zeros"]).there)
    assert "copies ids that have no row to the host" in reason(model)
    assert "2560 bytes" in reason(model)
    assert "find_rows" in str(recfx.explain(model.eval()))
    monkeypatch.undo()
    launch.is_possible.cache_clear()
    without = nn.Sequential(Pair(Place(DEVICE), HASHING["zeros"]).there)
    assert "bytes" not in reason(without)
    codes = {one.code for collection in recfx.explain(without).collections for one in collection.declined}
    assert "found_on_host" in codes


class Trained(nn.Module):
    """What a pipeline trains."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.model(features).values()
        return (pooled - 1).square().sum(), pooled.detach()


def waits_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the main thread calls to wait for the device: grows as it does. What it has not started itself is there."""
    waits, started = list[str](), list[Any]()

    def note(of: Any, name: str, call: Callable[..., Any], noted: Callable[..., Any]) -> None:
        def noting(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                noted(*arguments)
            return call(*arguments, **named)

        monkeypatch.setattr(of, name, noting)

    event: Any = torch.npu.Event
    note(event, "record", event.record, lambda recorded, *_: started.append(recorded))
    note(event, "query", lambda asked: all(asked is not own for own in started), lambda *_: None)
    for of in (event, torch.npu.Stream, torch.npu):
        note(of, "synchronize", of.synchronize, lambda *_: waits.append("synchronize"))
    for name in ("cpu", "item", "tolist", "nonzero"):
        on_device = lambda tensor, *_, name=name: waits.extend([name] * (tensor.device.type == "npu"))  # noqa: E731
        note(torch.Tensor, name, getattr(torch.Tensor, name), on_device)
    return waits


@pytest.mark.parametrize("new_ids", [0, 3])
def test_what_a_step_waits_for(new_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline, for ids without a row alone: the count is there once the batch is in turn."""
    pair = Pair(Place(DEVICE), HASHING["zeros"])
    batches = [pair.batch(seed, 20).to(torch.device(DEVICE)) for seed in (0, 0, 0)]
    new = bags({"f0": [[70, 71, 72][:new_ids]] * 4, "f1": [[]] * 4, "f2": [[]] * 4, "f3": [[]] * 4})
    batches.append(new.to(torch.device(DEVICE)))
    pipeline = recfx.TrainPipeline(Trained(pair.there), torch.optim.SGD([torch.zeros(1)]), torch.device(DEVICE))
    source, waits = iter(batches), list[str]()
    for number in range(len(batches)):
        if number == 2:
            waits = waits_of(monkeypatch)
        pipeline.progress(source)
    assert waits == ["synchronize"] * (new_ids > 0)


@pytest.mark.parametrize("training", [False, True])
def test_whole_graphs(training: bool) -> None:
    """Their nodes stay as they are, on whatever device and in whatever mode."""
    features = batch(3, ("f0", "f1"))
    by_path: list[Any] = []
    for path in (["cpu", "cpu"], [DEVICE, DEVICE], [DEVICE, "cpu"], ["cpu", DEVICE]):
        torch.manual_seed(0)
        model = nn.Sequential(EmbeddingBagCollection([table("t0", ["f0"]), table("t1", ["f1"])]))
        attach(model, "adagrad")
        model.train(training)
        hashing = recfx.HashConfig(dense_rows=0, on_full="evict")
        whole = recfx.convert(model, (features,), hashing=hashing, device=path[0], whole_graph=True)
        assert ("find_rows" in whole.eval_graph.code) == (path[0] == DEVICE)
        assert "find_rows" not in whole.train_graph.code
        whole = (copy.deepcopy(whole) if path[0] == path[1] else whole).to(path[1])
        place = features.to(torch.device(path[1]))
        outputs = []
        for mode in (False, True, False):
            outputs.append(whole.train(mode)(place).values().detach().cpu())
        by_path.append(outputs)
    for of_path in by_path[1:]:
        for value, expected in zip(of_path, by_path[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
