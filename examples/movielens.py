"""Ratings of MovieLens as rows of a log: who liked which film, and when."""

from __future__ import annotations

from pathlib import Path

import torch
from criteo import BadRows, Rows

SPREAD = -0x61C8864680B583EB
"""Odd: multiplied by it, modulo 2**64, no two ids become one, and they are as raw as any."""


def read_ratings(path: Path) -> Rows:
    """Read ``u.data``, or the same with a line of names: user, film, rating and time, by tabs.

    The rows are in a random order, always the same; a rating of 4 or 5 is a click. The only number is the time.

    Raises:
        BadRows: a line does not have this format.
    """
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    lines = lines[bool(lines) and not lines[0][0].isdigit() :]
    try:
        users, films, ratings, times = (
            torch.tensor([float(value) for value in column]) for column in zip(*lines, strict=True)
        )
    except ValueError as error:
        raise BadRows(f"{path} does not have four numbers in every line, with tabs between them ({error})") from error
    ids = torch.stack([users, films], dim=1).long() * SPREAD
    when = ((times - times.mean()) / times.std()).unsqueeze(1)
    rows = Rows((ratings >= 4).float(), when, ids, torch.ones_like(ids, dtype=torch.bool), ("user", "film"))
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
