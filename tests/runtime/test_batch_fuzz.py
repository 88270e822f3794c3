"""Thousands of batches, most of them wrong: each is answered as by the standard collection, or refused in one way."""

from __future__ import annotations

import itertools

import pytest

from recfx.runtime.select_features import BatchChecks
from tests.sharding.ranks import ranks
from tests.support.batch_fuzz import run_sharded, run_unsharded
from tests.support.forked_script import run_script
from tests.support.random_batches import make_batch

# In processes of their own: what crashes one is found, and named.
_RUN = """
import sys, torch
torch.set_num_threads(1)
from tests.support.batch_fuzz import run_unsharded

def note(seed):
    print(seed, file=sys.stderr, flush=True)

tried, wrong = run_unsharded(range({first}, {last}), {is_weighted}, note)
print(tried, *wrong, sep="\\n")
"""


@pytest.mark.parametrize("is_weighted", [False, True], ids=["unweighted", "weighted"])
def test_unsharded(is_weighted: bool) -> None:
    """Every batch on seven collections: adopted, static and hashed, by several kernels."""
    first = 10_000 if is_weighted else 0
    code = _RUN.format(first=first, last=first + 250, is_weighted=is_weighted)
    finished = run_script(code)
    assert finished.returncode == 0, f"the process ended at seed {finished.stderr[-1000:]}"
    tried, *wrong = finished.stdout.splitlines()
    assert not wrong, "\n".join(wrong[:5])
    assert int(tried) > 220


@pytest.mark.parametrize("hashing", ["adopted", "static", "hashed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded(world_size: int, hashing: str) -> None:
    for is_weighted in (False, True):
        first = 20_000 + 1_000 * world_size + 100 * is_weighted
        answers = ranks(world_size).run(run_sharded, range(first, first + 30), is_weighted, hashing)
        wrong = list(itertools.chain.from_iterable(answer[1] for answer in answers))
        assert not wrong, "\n".join(wrong[:5])
        assert all(tried > 25 for tried, _ in answers)


def test_the_fuzzer_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that nobody checks, say."""
    short = next(
        seed
        for seed in itertools.count()
        if (batch := make_batch(seed, False)).notes == ["size_of_weights"]
        and batch.weights is not None
        and batch.weights.numel() < batch.values.numel()
    )
    assert run_unsharded(range(short, short + 1), False) == (1, [])
    monkeypatch.setattr(BatchChecks, "_weights", lambda *_: None)
    _, wrong = run_unsharded(range(short, short + 1), False)
    assert len(wrong) == 7
    assert all("answered, but the standard collection raises" in problem for problem in wrong)
