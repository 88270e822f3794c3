"""The registry of rules."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from recfx.optim.rules import RULES
from recfx.optim.rules.rule import Rule
from tests.optim.rules import steps


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_one_constant_of_its_module(rule: Rule) -> None:
    module = type(rule).__module__
    assert getattr(sys.modules[module], rule.name.upper()) is rule
    assert copy.deepcopy(rule) is rule
    assert pickle.loads(pickle.dumps(rule)) is rule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_it_says_when_cut_columns_change_it(rule: Rule) -> None:
    """One number per row is a mean over the columns of a block; LAMB and LARS-SGD take norms over them."""
    changes = rule.has_row_state or "lamb" in rule.name or "lars" in rule.name
    told = rule.when_columns_are_cut(3)
    assert (told is not None) == changes
    assert told is None or "3 column blocks" in told[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_states_are_saved_under_the_names_of_torchrec(rule: Rule) -> None:
    """TorchRec 1.8 calls the first one "momentum1", and any other as FBGEMM's ``get_optimizer_state`` calls it."""
    names = [spec.name for spec in rule.states]
    assert [spec.saved_as for spec in rule.states] == ["momentum1", *names[1:]][: len(names)]


def test_no_two_stand_for_the_same() -> None:
    stand_for = [name for rule in RULES for name in (rule.name, *rule.classes, *rule.fused_types)]
    assert len(set(stand_for)) == len(stand_for)


# Not of the rules that scale a step to the length of its row.
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if "lamb" not in rule.name and "lars" not in rule.name], ids=lambda rule: rule.name
)
def test_without_weight_decay_an_infinite_weight_stays_infinite(rule: Rule) -> None:
    """As in the dense optimizer."""
    start = torch.ones(2, 4)
    start[1] = torch.inf
    weight, parameter = start.clone(), nn.Parameter(start.clone())
    ours, dense = steps.fused(rule, {"lr": 0.5}, weight), rule.dense_class([parameter], lr=0.5)
    gradient = torch.arange(1.0, 9.0).view(2, 4)
    ours.step(weight, torch.arange(2), gradient)
    parameter.grad = gradient
    dense.step()
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)
    assert bool(weight[1].isinf().all())
