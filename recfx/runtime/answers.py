"""The answers for ids without a row, outside training."""

from __future__ import annotations

import torch

from recfx.hashing import HashIndex


def answer_unseen(index: HashIndex, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """In eval mode: ``rows`` (int64 ``[n]``, -1 if ``find`` found none), completed by ``HashConfig.unseen``."""
    if index.config.unseen == "share":
        return torch.where(rows < 0, index.shared_rows(ids), rows)
    return rows
