"""A new sharding type is one file and one line in the list of types; everything that is made of types knows it then."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import recfx
from recfx.collections.sharding.types import SHARDING_TYPES
from tests.sharding.cases import Case, Table, check, train_sharded
from tests.sharding.ranks import ranks
from tests.toys.one_rank import OneRank

TABLES = (
    Table("a", 48, 8, ("f0",), "SUM", ("one_rank", 1)),
    Table("b", 40, 4, ("f1", "f0"), "MEAN", ("one_rank", 0)),
    Table("c", 48, 8, ("f2",), "SUM", ("table_wise", 1)),
    Table("d", 48, 8, ("f0",), "MEAN", ("row_wise",)),
)


def with_toy(rank: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a rank's function while the list of types has one line more."""
    SHARDING_TYPES["one_rank"] = OneRank()
    try:
        return function(rank, world_size, *arguments)
    finally:
        del SHARDING_TYPES["one_rank"]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_outputs_gradients_and_steps_equal_the_unsharded_model(optimizer: str) -> None:
    case = Case(TABLES, optimizer=optimizer, sizes=(3, 2))
    check(case, 2, ranks(2).run(with_toy, train_sharded, case))


def test_no_other_file_asks_for_a_type_by_name() -> None:
    package = Path(recfx.__file__).parent
    names = set(SHARDING_TYPES)
    places = [
        f"{path.relative_to(package)}:{node.lineno}: {node.value}"
        for path in package.rglob("*.py")
        if path not in (package / "collections" / "sharding" / "types.py", package / "ir" / "ways_back.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert places == []
