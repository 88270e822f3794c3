"""Loading that is interrupted: a table whose rows may be others is not used, until the checkpoint is loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import recfx
from recfx.checkpoint import model_plan, storage
from recfx.hashing import state
from tests.checkpoint.training import OnePart, Training, assert_same, batch


def training(seed: int) -> Training:
    return Training.build("adam", rows=120, seed=seed, model_class=OnePart)


@pytest.mark.parametrize("where", ["weights", "index"])
def test_an_interrupted_load_is_made_good_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    source, target = training(0), training(3)
    source.steps(0, 2)
    source.save(tmp_path)
    target.steps(5, 6)
    begun: list[bool] = []

    def begin(plan: model_plan.ModelPlan) -> None:
        begun.append(True)
        carry_out(plan)

    def interrupt(*given: Any) -> Any:
        if begun:
            raise KeyboardInterrupt
        return ordinary(*given)

    module, name = (storage, "read_into") if where == "weights" else (state, "buffers_from_state")
    ordinary: Any = getattr(module, name)
    carry_out = model_plan.ModelPlan.carry_out
    with monkeypatch.context() as patched:
        patched.setattr(model_plan, "IN_PLACE_BYTES", 0)
        patched.setattr(model_plan.ModelPlan, "carry_out", begin)
        patched.setattr(module, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            target.load(tmp_path)
    for use in (lambda: target.model(batch(0)), target.model.state_dict, lambda: target.save(tmp_path)):
        with pytest.raises(recfx.CheckpointError) as caught:
            use()
        assert caught.value.reason == "load_interrupted"
    target.load(tmp_path)
    found, expected = target.everything(), source.everything()
    for each in (found, expected):
        del each["first.a.slot_groups"]  # which order ids came in
    assert_same(found, expected)
