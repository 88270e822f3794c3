"""SGD: the reference step beside ``torch.optim.SGD``, and what stands for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import SGD as TorchRecSGD

from recfx.optim.rules import rule_of_class, rule_of_type
from recfx.optim.rules.sgd import SGD
from tests.optim.rules.steps import check_against_dense, check_other_rows_stay, fused, table


@pytest.mark.parametrize("settings", [{"lr": 0.3}, {"lr": torch.tensor(0.3)}, {"lr": 0.3, "weight_decay": 0.2}])
def test_steps(settings: dict[str, Any]) -> None:
    check_against_dense(SGD, settings)
    check_other_rows_stay(SGD, settings)


def test_what_stands_for_it() -> None:
    assert [rule_of_class(each) for each in (torch.optim.SGD, TorchRecSGD)] == [SGD, SGD]
    assert [rule_of_type(each) for each in (EmbOptimType.SGD, EmbOptimType.EXACT_SGD)] == [SGD, SGD]
    assert rule_of_class(type("Derived", (torch.optim.SGD,), {})) is None


def test_it_keeps_nothing() -> None:
    assert (SGD.tensor_names, SGD.saved_states, SGD.counts_steps) == ((), {}, False)
    assert fused(SGD, {"lr": 0.3}, table()).state == {}


def test_only_weight_decay_makes_it_unlike_the_dense_rule() -> None:
    assert SGD.unlike_dense({"lr": 1.0}) == ""
    assert SGD.unlike_dense({"lr": 1.0, "weight_decay": 0.25}) == "sgd with weight_decay=0.25"
