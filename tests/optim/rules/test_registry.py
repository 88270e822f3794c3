"""The registry of rules, and that no code outside of the rules' files knows which there are."""

from __future__ import annotations

import ast
import copy
import pickle
import sys
from pathlib import Path

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from recfx.optim.rules import RULES, class_names, known_settings, rule_of_type
from recfx.optim.rules.rule import Rule

ROOT = Path(__file__).resolve().parents[3]
ROOM = ROOT / "recfx" / "optim"
NAMES = {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_one_constant_of_the_file_of_its_name(rule: Rule) -> None:
    module = type(rule).__module__
    assert module == f"recfx.optim.rules.{rule.name}"
    assert getattr(sys.modules[module], rule.name.upper()) is rule
    assert copy.deepcopy(rule) is rule
    assert pickle.loads(pickle.dumps(rule)) is rule


def test_no_two_stand_for_the_same() -> None:
    stand_for = [each for rule in RULES for each in (rule.name, *rule.classes, *rule.fused_types)]
    assert len(set(stand_for)) == len(stand_for)


def test_types_that_none_stands_for() -> None:
    assert rule_of_type(EmbOptimType.LAMB) is None
    assert rule_of_type("sgd") is None


def test_what_messages_list() -> None:
    assert class_names() == "SGD, Adagrad, RowWiseAdagrad or Adam"
    names = [name for setting in known_settings() for name in setting.fused_params]
    assert names == ["learning_rate", "eps", "beta1", "beta2", "weight_decay"]


def _sources() -> dict[Path, ast.Module]:
    """Every file of the project but the rules' own."""
    paths = {path.resolve() for folder in ("recfx", "lowering", "kernels") for path in (ROOT / folder).rglob("*.py")}
    return {path: ast.parse(path.read_text()) for path in paths if path.parent != ROOM / "rules"}


def test_only_a_rules_file_names_the_rule() -> None:
    """Neither a comparison with a rule's name nor a dict by names; a kernel target alone says which rules it has."""
    for path, tree in _sources().items():
        nodes = list(ast.walk(tree))
        assert not {node.value for node in nodes if isinstance(node, ast.Constant)} & NAMES, path
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        if path.parent != ROOT / "lowering":
            assert not imported & {type(rule).__module__ for rule in RULES}, path


def test_one_file_knows_the_attributes_that_torch_sets() -> None:
    torchs = {"_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs"}
    know = set()
    for path, tree in _sources().items():
        for node in ast.walk(tree):
            name = (
                node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else ""
            )
            if isinstance(name, str) and name in torchs:
                know.add(path)
    assert know == {ROOM / "attached.py"}
