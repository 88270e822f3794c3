"""Training that was saved, and goes on in another process, is the training that was never interrupted: to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import resume_worker
from tests.checkpoint.resume_worker import STEPS
from tests.checkpoint.training import CONFIGS, KINDS, Training, assert_same
from tests.support.forked_script import run_script

CASES = [(kind, config) for kind in KINDS for config in CONFIGS]
Run = tuple[dict[str, Any], list[float], dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    """By case: state at the save, losses after it and state at the end; here without a stop, and resumed elsewhere."""
    folder = tmp_path_factory.mktemp("resume")
    here: dict[str, Run] = {}
    for kind, config in CASES:
        training = Training.build(kind, CONFIGS[config])
        training.steps(0, STEPS)
        for attached in training.user_optimizers.values():  # a schedule
            attached.param_groups[0]["lr"] *= 0.5
        before = training.everything()
        training.save(folder / f"{kind}-{config}")
        assert_same(training.everything(), before)
        losses = training.steps(STEPS, 2 * STEPS)
        here[f"{kind}-{config}"] = before, losses, training.everything()
    run_script(Path(resume_worker.__file__), str(folder), str(torch.get_num_threads())).check_returncode()
    return {case: (run, torch.load(folder / f"{case}.pt", weights_only=False)) for case, run in here.items()}


@pytest.mark.parametrize(("kind", "config"), CASES)
def test_resumed_training_is_the_same_to_the_bit(runs: dict[str, tuple[Run, Run]], kind: str, config: str) -> None:
    (before, losses, after), (loaded, resumed_losses, resumed) = runs[f"{kind}-{config}"]
    assert_same(loaded, {**before, **{name: loaded[name] for name in _not_saved(before)}})
    assert resumed_losses == losses
    assert_same(resumed, {**after, **{name: resumed[name] for name in _not_saved(after)}})
    moved = [name for name in after if name.startswith("model.") and not torch.equal(before[name], after[name])]
    assert {"model.first.embedding_bags.a.weight", "model.first.hash_indexes.a.row_ids"} <= set(moved)


def _not_saved(state: dict[str, Any]) -> list[str]:
    """The slot table may be laid out in another order, and counts start anew; both hold the same ids."""
    return [name for name in state if name.endswith((".slot_groups",))]
