"""The answers for ids without a row, outside training and in a forward that is run again."""

from __future__ import annotations

import torch

from recfx.hashing import HashIndex


def answer_unseen(index: HashIndex, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """In eval mode: ``rows`` (int64 ``[n]``, -1 if ``find`` found none), completed by ``HashConfig.unseen``."""
    if index.config.unseen == "share":
        return torch.where(rows < 0, index.shared_rows(ids), rows)
    return rows


def answer_replayed(index: HashIndex, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """In a training forward that is run again: these ids had no row the first time either.

    Either their bucket was full, so they shared a row, or they were not admitted.
    """
    config, shared = index.config, index.shared_rows(ids)
    if not config.admits:
        return torch.where(rows < 0, shared, rows)
    answers = -shared - 2 if config.unseen == "share" else torch.full_like(rows, -1)
    if config.on_full == "share":
        candidates, sightings = index.candidates()
        was_admitted = torch.isin(ids, candidates[sightings >= config.admit_after])
        answers = torch.where(was_admitted, shared, answers)
    return torch.where(rows < 0, answers, rows)
