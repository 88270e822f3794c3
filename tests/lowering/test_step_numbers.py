"""The numbers of a step for several tables: those of each table's own settings, whatever has changed since."""

from typing import Any

import pytest
import torch

from recfx.lowering.step.cpu_backward import NumbersOfTables
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import Rule


def changed(value: Any) -> Any:
    return tuple(number / 3 for number in value) if isinstance(value, tuple) else value * 2 + 0.25


@pytest.mark.parametrize("in_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_numbers_are_those_of_each_tables_settings_now(rule: Rule, in_tensor: bool) -> None:
    """Two tables alike, and one that differs in each setting; a schedule may change a learning rate in place."""
    rate = torch.tensor(0.5)
    defaults = {setting.name: setting.default for setting in rule.settings} | ({"lr": rate} if in_tensor else {})
    others = [{**defaults, name: changed(value)} for name, value in defaults.items()]
    groups, numbers = [dict(defaults), dict(defaults), *others], NumbersOfTables(rule)

    def check(step: int) -> None:
        steps = [float(step + table) for table in range(len(groups))]
        of_tables = [rule.step_numbers(*both) for both in zip(steps, groups, strict=True)]
        for _ in range(2):
            assert numbers.of(groups, steps if rule.saves_step else None) == [n for some in of_tables for n in some]

    for step in range(1, 4):
        rate /= 2
        check(step)
    for setting in rule.settings:
        for table in (0, -1):
            groups[table][setting.name] = changed(groups[table][setting.name])
            check(2)
