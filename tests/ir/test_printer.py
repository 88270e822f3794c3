"""The printer's text, with metadata and for nodes that recfx did not make."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import recfx
from recfx.ir import format_graph
from tests.builders.optimizers import attach
from tests.passes.small_collection import ADOPTED, INDEXED, collection, lowered, until


def test_with_metadata() -> None:
    graph_module = lowered(collection(INDEXED, ADOPTED), until("insert_hash"))
    assert (
        format_graph(graph_module, with_meta=True)
        == """\
features = input
ebc_select_features = select_features(features)  # tables=users,ads shape=[B*(L_ad + L_friend + L_user)] bytes=8*B*(L_ad + L_friend + L_user) by=expand_collection
ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[users]}  # tables=users,ads shape=[B*(L_ad + L_friend + L_user)] bytes=8*B*(L_ad + L_friend + L_user) by=insert_hash
ebc_lookup = lookup(ebc_hash_ids) {tables=[users], combine=SUM, dtype=float32}  # tables=users shape=[B, 8] bytes=32*B by=expand_collection
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}  # tables=users shape=[B, 8] bytes=32*B by=insert_hash
ebc_lookup_1 = lookup(ebc_hash_ids) {tables=[ads], combine=SUM, dtype=float32}  # tables=ads shape=[B, 4] bytes=16*B by=expand_collection
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide, ebc_lookup_1)  # tables=users,ads shape=[B, 12] bytes=48*B by=expand_collection
return ebc_keyed_tensor"""  # noqa: E501
    )


def test_what_changes_what_runs_is_printed_as_it_is_now() -> None:
    plain = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])], is_weighted=True
    )
    attach(plain, torch.optim.Adagrad)
    converted: Any = recfx.convert(plain)
    line = "ebc_lookup = lookup(ebc_select_features) {tables=[t], combine=SUM, is_weighted, "
    assert f"{line}dtype=float32, optimizer=adagrad, kernel=cpu}}" in format_graph(converted.graph_module)
    assert "select_features(features) {is_weighted}" in format_graph(converted.graph_module)
    converted.to(torch.float64)
    assert f"{line}dtype=float64, optimizer=adagrad, kernel=reference}}" in format_graph(converted.graph_module)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        stacked = torch.cat([x, x], dim=-1)
        return {"a": self.layer(x) * self.scale, "b": (stacked.relu(), [x, None])}


def test_a_graph_of_another_make() -> None:
    traced = fx.symbolic_trace(Small())
    assert format_graph(traced, with_meta=True) == format_graph(traced)
    assert (
        format_graph(traced)
        == """\
x = input
cat = call_function[cat]([x, x], dim=-1)
layer = call_module[layer](x)
scale = scale
mul = call_function[mul](layer, scale)
relu = call_method[relu](cat)
return {'a': mul, 'b': (relu, [x, None])}"""
    )
