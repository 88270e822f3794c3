"""Hundreds of batches, most of them wrong: each is answered as by the standard collection, or refused in one way."""

from __future__ import annotations

import pytest

from tests.support.batch_fuzz import run_unsharded


@pytest.mark.parametrize("is_weighted", [False, True], ids=["unweighted", "weighted"])
def test_unsharded(is_weighted: bool) -> None:
    """Every batch on collections that are adopted, static and hashed, by several kernels."""
    first = 10_000 if is_weighted else 0
    tried, wrong = run_unsharded(range(first, first + 250), is_weighted)
    assert not wrong, "\n".join(wrong[:5])
    assert tried > 220
