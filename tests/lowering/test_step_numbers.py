"""The numbers of a step for several tables: those of each table's own settings, whatever has changed since."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recfx.lowering.step.cpu_backward import NumbersOfTables
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import Rule

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def rule_named(name: str) -> Rule:
    return next(rule for rule in RULES if rule.name == name)


def changed(value: Any) -> Any:
    return tuple(number / 3 for number in value) if isinstance(value, tuple) else value * 2 + 0.25


def groups_of(rule: Rule) -> list[dict[str, Any]]:
    """Two tables with the defaults of each setting, and one table for each setting with another value."""
    defaults = {setting.name: setting.default for setting in rule.settings}
    others = [{**defaults, name: changed(value)} for name, value in defaults.items()]
    return [dict(defaults), dict(defaults), *others]


def numbers_of_rule(rule: Rule, groups: list[dict[str, Any]], steps: list[float] | None) -> list[float]:
    steps = steps or [0.0] * len(groups)
    return [number for group, step in zip(groups, steps, strict=True) for number in rule.step_numbers(step, group)]


@every_rule
def test_tables_that_differ_in_any_setting(rule: Rule) -> None:
    groups, numbers = groups_of(rule), NumbersOfTables(rule)
    for step in range(1, 4):
        steps = [float(step + table) for table in range(len(groups))] if rule.saves_step else None
        assert numbers.of(groups, steps) == numbers_of_rule(rule, groups, steps)


@every_rule
def test_a_setting_that_changes_between_steps(rule: Rule) -> None:
    groups, numbers = groups_of(rule), NumbersOfTables(rule)
    steps = [2.0] * len(groups) if rule.saves_step else None
    for setting in rule.settings:
        for table in (0, len(groups) - 1):
            groups[table][setting.name] = changed(groups[table][setting.name])
            for _ in range(2):
                assert numbers.of(groups, steps) == numbers_of_rule(rule, groups, steps)


@pytest.mark.parametrize("name", ["sgd", "adam", "lars_sgd"])
def test_a_learning_rate_in_a_tensor_that_a_schedule_changes_in_place(name: str) -> None:
    rule, rate = rule_named(name), torch.tensor(0.5)
    groups, numbers = [{**group, "lr": rate} for group in groups_of(rule)], NumbersOfTables(rule)
    steps = [2.0] * len(groups) if rule.saves_step else None
    for _ in range(3):
        rate /= 2
        assert numbers.of(groups, steps) == numbers_of_rule(rule, groups, steps)
