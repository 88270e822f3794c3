"""Answers for ids without a row: ids that have one keep it, be it row 0."""

from __future__ import annotations

import torch

import recfx
from recfx.runtime.answers import answer_unseen

IDS = torch.tensor([5, 6, 7, 8])


def test_rows_that_were_found_stay() -> None:
    model = recfx.HashEmbeddingBagCollection(
        [
            recfx.HashEmbeddingBagConfig(
                name="t", num_embeddings=16, embedding_dim=4, feature_names=["f"],
                hashing=recfx.HashConfig(dense_rows=0, on_full="share", unseen="share"),
            )
        ]
    )  # fmt: skip
    index = model.index("t")
    shared = index.shared_rows(IDS)
    for own in (0, 1):
        for place in range(4):
            rows = torch.full((4,), -1)
            rows[place] = own
            expected = shared.clone()
            expected[place] = own
            assert answer_unseen(index, IDS, rows).tolist() == expected.tolist()
    assert (shared > 0).any()
