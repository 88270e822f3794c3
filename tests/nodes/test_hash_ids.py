"""What ``hash_ids`` counts: sightings, each once."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_replayed_by_activation_checkpointing_counts_nothing(use_reentrant: bool) -> None:
    plain = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
    )
    converted = recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0))
    features = KeyedJaggedTensor(["f"], torch.tensor([70, 80, 70]), lengths=torch.tensor([3]))
    runs = 0

    def forward(scale: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return converted(features).values() * scale

    scale = torch.ones(1, requires_grad=True)
    checkpoint(forward, scale, use_reentrant=use_reentrant).sum().backward()
    assert runs == 2
    assert converted.index("t").counters["ids_seen"] == 3
    assert converted.index("t").counters["inserted"] == 2
    gradient = converted.weight("t").grad
    assert gradient[:3, 0].tolist() == [2.0, 1.0, 0.0]
