"""The copies between the host, which hashes ids, and the device of the tables: nodes of the graph, without a wait."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.ir import format_graph
from recfx.ir.meta import node_meta
from recfx.runtime.transfers import copy_to_device, copy_to_host
from tests.ascend.npu_runtime.training import DEVICE
from tests.builders.batches import batch
from tests.builders.collections import table

RAW = recfx.HashConfig(dense_rows=0)


def converted(hashing: recfx.HashConfig | None = RAW, weighted: bool = False) -> HashEmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [table("t0", ["f0"], dim=4), table("t1", ["f1"], dim=4)]
    return recfx.convert(EmbeddingBagCollection(tables, is_weighted=weighted), hashing=hashing)


def kinds(collection: HashEmbeddingBagCollection) -> list[str]:
    metas = [node_meta(node) for node in collection.graph_module.graph.nodes]
    return [meta.kind for meta in metas if meta is not None]


def test_the_graph_has_the_copies_while_the_tables_are_on_the_device() -> None:
    collection = converted().eval()
    on_host = format_graph(collection.graph_module)
    collection.to(DEVICE)
    assert (
        format_graph(collection.graph_module)
        == """\
features = input
ebc_select_features = select_features(features)
ebc_to_host = to_host(ebc_select_features)
ebc_hash_ids = hash_ids(ebc_to_host) {hashed=[t0, t1], operators=cpu}
ebc_to_device = to_device(ebc_hash_ids)
ebc_lookup = lookup(ebc_to_device) {tables=[t0, t1], combine=SUM, dtype=float32, kernel=reference}
ebc_keyed_tensor = keyed_tensor(ebc_lookup)
return ebc_keyed_tensor"""
    )
    assert not collection.graph_module.training
    metas = [node_meta(node) for node in collection.graph_module.graph.nodes]
    sizes = {meta.kind: (str(meta.bytes), meta.device) for meta in metas if meta is not None}
    assert sizes["to_host"] == sizes["hash_ids"] == ("8*B*(L_f0 + L_f1)", "cpu")
    assert sizes["to_device"] == ("8*B*(L_f0 + L_f1)", "npu")
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))):
        assert kinds(other) == kinds(collection)
    collection.to("cpu")
    assert format_graph(collection.graph_module) == on_host


def outputs(model: nn.Module, features: KeyedJaggedTensor, modes: tuple[bool, ...]) -> list[torch.Tensor]:
    tensors = []
    for training in modes:
        model.train(training)
        pooled = model(features).values()
        pooled.square().sum().backward()
        tensors.append(pooled.detach().cpu())
        if features.weights_or_none() is not None:
            weights: Any = features.weights()
            tensors.append(weights.grad.cpu())
            weights.grad = None
    return tensors


@pytest.mark.parametrize("ids_on", ["npu:0", "cpu"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(
    "hashing",
    [RAW, recfx.HashConfig(dense_rows=0, unseen="share"), recfx.HashConfig(dense_rows=0, admit_after=2)],
    ids=["zeros", "share", "admit"],
)
def test_outputs_and_gradients_are_those_of_the_cpu(
    hashing: recfx.HashConfig, weighted: bool, dtype: torch.dtype, ids_on: str
) -> None:
    """In eval mode first, when no id has a row, and after half of the ids got one."""
    by_device = []
    for device, place in (("cpu", "cpu"), (DEVICE, ids_on)):
        collection = converted(hashing, weighted).to(device)
        every = batch(6, ("f0", "f1"), weighted=weighted)
        some = batch(3, ("f0", "f1"), weighted=weighted)
        results = []
        for features, modes in ((every, (False,)), (some, (True, True)), (every, (False, True))):
            made = KeyedJaggedTensor(
                features.keys(), features.values().to(dtype), features.weights_or_none(), lengths=features.lengths()
            ).to(torch.device(place))
            if weighted:
                made.weights().requires_grad_()
            results += outputs(collection, made, modes)
        results += [parameter.grad.cpu() for parameter in collection.parameters() if parameter.grad is not None]
        by_device.append(results)
    assert len(by_device[0]) == len(by_device[1])
    for on_device, expected in zip(by_device[1], by_device[0], strict=True):
        torch.testing.assert_close(on_device, expected, rtol=1e-5, atol=1e-6)


def test_copies_are_pinned_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    events: Any = torch.npu.Event
    monkeypatch.setattr(events, "query", lambda self: False)
    monkeypatch.setattr(events, "synchronize", lambda self: waits.append("event"))
    monkeypatch.setattr(torch.npu, "synchronize", lambda *_: waits.append("device"))
    (ids,) = copy_to_host([torch.arange(5, device=DEVICE)])
    assert (ids.is_pinned(), ids.tolist(), waits) == (True, [0, 1, 2, 3, 4], ["event"])
    made: list[tuple[bool, Any]] = []
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append((self.is_pinned(), kwargs.get("non_blocking")))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    rows = copy_to_device(torch.arange(5), torch.device(DEVICE))
    assert (rows.device, made, waits) == (torch.device(DEVICE), [(True, True)], ["event"])
