"""How many ids fit into rows that are divided into buckets: fewer than there are rows, because buckets fill unevenly.

Ids fall into buckets by their hash, like balls into bins. With independent Poisson arrivals, one id per bucket and unit
of time, a bucket with ``f`` free rows still has room at time ``x`` with probability ``Q(f + 1, x)``, the regularised
upper incomplete gamma function. On average, the first id that meets a full bucket is number
``buckets * integral over x > 0 of the product of Q(f_b + 1, x) over the buckets b``. For equal buckets this is the
generalised birthday problem: M. S. Klamkin, D. J. Newman, "Extensions of the birthday surprise", Journal of
Combinatorial Theory 3 (1967), 279-282. The expectation is exact; the integral is computed numerically.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_POINTS = 1024
_DISTINCT = 32  # only the fullest buckets matter; this many different numbers of free rows are considered
_BEFORE, _AFTER = 8, 5  # how far the integral reaches, around the drop


def expected_room(free_rows: Tensor) -> float:
    """How many new ids fit, on average, before one meets a full bucket.

    Args:
        free_rows: int64 ``[buckets]``, the number of free rows per bucket.
    """
    free, buckets = torch.unique(free_rows, return_counts=True)
    return _room(free[:_DISTINCT], buckets[:_DISTINCT], free_rows.numel())


def _room(free: Tensor, counts: Tensor, buckets: int) -> float:
    """``expected_room`` for ``counts[i]`` buckets with ``free[i]`` free rows each, in ascending order."""
    if buckets == 1:
        return float(free[0])
    # In u = sqrt(x), the drop from 1 to 0 is equally wide for every number of rows, because the square root of a
    # Poisson number has a standard deviation of about 1/2. 16 deviations before the drop, the product is 1.
    shape = (free + 1).double()
    middle = math.sqrt(float(shape[0]))
    begin = max(0.0, middle - _BEFORE)
    u = torch.linspace(begin, middle + _AFTER, _POINTS, dtype=torch.float64, device=shape.device)
    has_room = torch.special.gammaincc(shape[:, None], (u * u)[None, :]).pow(counts[:, None]).prod(dim=0)
    first_full = buckets * (begin**2 + float(torch.trapezoid(2 * u * has_room, u)))
    return max(first_full - 1, 0.0)
