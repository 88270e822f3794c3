"""The printer's text, with metadata and for nodes that recfx did not make."""

from __future__ import annotations

import torch
from torch import fx, nn

from recfx.ir import format_graph
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection


def test_with_metadata() -> None:
    graph_module, _, _, _ = after("insert_hash", collection(INDEXED, ADOPTED))
    assert (
        format_graph(graph_module, with_meta=True)
        == """\
features = input
ebc_select_features = select_features(features)  # tables=users,ads shape=[B*(L_ad + L_friend + L_user)] bytes=8*B*(L_ad + L_friend + L_user) by=expand_collection
ebc_hash_ids = hash_ids(ebc_select_features)  # tables=users,ads shape=[B*(L_ad + L_friend + L_user)] bytes=8*B*(L_ad + L_friend + L_user) by=insert_hash
ebc_lookup = lookup(ebc_hash_ids)  # tables=users shape=[B, 8] bytes=32*B by=expand_collection
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features)  # tables=users shape=[B, 8] bytes=32*B by=insert_hash
ebc_lookup_1 = lookup(ebc_hash_ids)  # tables=ads shape=[B, 4] bytes=16*B by=expand_collection
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide, ebc_lookup_1)  # tables=users,ads shape=[B, 12] bytes=48*B by=expand_collection
return ebc_keyed_tensor"""  # noqa: E501
    )


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
