"""The printer's text, as modules are now and for nodes that recfx did not make."""

from __future__ import annotations

from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import recfx
from recfx.ir import format_graph
from tests.builders.optimizers import attach


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
