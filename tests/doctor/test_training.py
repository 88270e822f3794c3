"""Small models train on the CPU as in plain ATen; and a run that does not is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recfx.doctor import training as training_module
from recfx.doctor.training import train, trainings

CPU = torch.device("cpu")


def test_models_train_alike() -> None:
    answers = [run(True) for _, run in trainings(CPU)]
    assert len(answers) == 5
    assert [answer for answer in answers if not answer.ok] == []


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("outputs", lambda outputs: [*outputs[:-1], outputs[-1] + 1], "outputs: result 5: "),
        ("embedding_bags.t1.weight", lambda weight: weight + 1e-3, "embedding_bags.t1.weight: "),
        ("t0.sum", lambda state: state * 2, "t0.sum: "),
    ],
)
def test_what_differs_is_told(name: str, change: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(ids: str, optimizer: str, device: torch.device, backend: str) -> dict[str, Any]:
        results = train(ids, optimizer, device, backend)
        return results if backend == "reference" else results | {name: change(results[name])}

    monkeypatch.setattr(training_module, "train", changed)
    (run,) = (run for title, run in trainings(CPU) if title == "training, raw ids, Adagrad")
    answer = run(True)
    assert not answer.ok
    assert answer.message.startswith(told)


def test_a_run_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(training_module, "train", fail)
    (_, run), *_ = trainings(CPU)
    assert run(True).message == "ValueError: no such kernel"
