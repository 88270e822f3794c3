"""Sharding types: their rules, uneven columns, and a type of the user's."""

import ast
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

import recfx
from recfx.collections.sharding.types import SHARDING_TYPES
from tests.sharding.cases import FORMS, Case, Table, batches, build, check, shard, train_sharded, train_whole, values_of
from tests.sharding.ranks import ranks
from tests.sharding.stateful import case_of, make, tables_of, train, whole_state
from tests.sharding.typical_cases import CONFIGS, TYPES, hashed_case, one_type, random_case
from tests.support.pairwise import pairwise
from tests.toys.one_rank import OneRank


@pairwise(kind=sorted(TYPES), world_size=[1, 2, 4], form=FORMS)
def test_a_type_alone_equals_the_unsharded_model(kind: str, world_size: int, form: str) -> None:
    case = one_type(kind, local_size=2 if world_size == 4 else 0)
    case = FORMS[form](case)
    check(case, world_size, ranks(world_size).run(train_sharded, case))


@pairwise(number=range(6), world_size=[2, 4], form=FORMS)
def test_a_random_mixed_plan_equals_the_unsharded_model(number: int, world_size: int, form: str) -> None:
    case = random_case(number + 100 * world_size, world_size)
    case = FORMS[form](case)
    check(case, world_size, ranks(world_size).run(train_sharded, case), rtol=1e-4, atol=1e-5)


def check_hashed(case: Case, world_size: int, steps: int) -> None:
    answers = ranks(world_size).run(train_sharded, case, steps)
    expected, converted = train_whole(case, world_size, steps)
    check(case, world_size, answers, rtol=1e-4, atol=1e-5, expected=expected)
    for answer in answers:
        for table, ((first, end), state) in answer["indexes"].items():
            for name, whole in converted.index(table).state_dict().items():
                if name not in ("counts", "slice_counts", "identity"):
                    assert torch.equal(state[name], whole[first:end]), f"{name} of table {table}"
            assert int(state["counts"][0]) == steps


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise", "row_wise"])
def test_three_ranks_equal_the_unsharded_model(kind: str) -> None:
    """One table has fewer rows than there are ranks."""
    case = one_type(kind, sizes=(3, 1, 2))
    small = replace(case.tables[1], rows=2)
    case = replace(case, tables=(case.tables[0], small))
    check(case, 3, ranks(3).run(train_sharded, case))


BY_COLUMNS = ["column_wise", "grid_shard", "table_column_wise"]


@pairwise(kind=sorted(set(TYPES) - {*BY_COLUMNS}), config=sorted(CONFIGS), world_size=[2, 4], form=FORMS)
def test_a_hashed_type_equals_one_rank(kind: str, config: str, world_size: int, form: str) -> None:
    case = hashed_case(kind, config, local_size=2 if world_size == 4 else 0, sizes=(3, 5))
    check_hashed(FORMS[form](case), world_size, 6)


@pairwise(kind=BY_COLUMNS, config=sorted(CONFIGS), form=FORMS)
def test_column_shards_of_a_hashed_table_agree(kind: str, config: str, form: str) -> None:
    # Adagrad: row-wise Adagrad keeps its state by column block, which is another rule.
    case = hashed_case(kind, config, local_size=2, sizes=(3, 5))
    check_hashed(FORMS[form](case), 4, 6)


@pairwise(kind=sorted(TYPES), config=["lru", "lfu_admit"], optimizer=["adagrad_from_a_half", "adam"], form=FORMS)
def test_a_dense_kernel_evicts_with_an_ordinary_optimizer(kind: str, config: str, optimizer: str, form: str) -> None:
    world_size = 4 if kind in BY_COLUMNS else 2
    case = hashed_case(kind, config, local_size=2, sizes=(3, 5))
    check_hashed(FORMS[form](replace(case, kernel="dense", optimizer=optimizer)), world_size, 6)


def moved(rank: int, world_size: int, case: Case, division: bool) -> list[tuple[str, torch.Tensor]]:
    """How far one step of SGD moves this rank's shards."""
    before = get_gradient_division()
    set_gradient_division(division)
    try:
        standard, _ = build(case)
        sharded = shard(case, standard, world_size)
        own = [(shard.name, sharded._store.weight(shard.name)) for shard in sharded.sharding.local()]
        old = copy.deepcopy([weight.detach() for _, weight in own])
        values = values_of(sharded(batches(case, world_size, 1)[0][rank]))
        (values * torch.linspace(-1, 2, values.numel()).view_as(values)).sum().backward()
        return [(name, weight.detach() - start) for (name, weight), start in zip(own, old, strict=True)]
    finally:
        set_gradient_division(before)


@pairwise(kind=sorted(TYPES), form=["pooled", "rows sent once"])
def test_one_step(kind: str, form: str) -> None:
    world_size = 2
    case = FORMS[form](one_type(kind))
    averaged, summed = (ranks(world_size).run(moved, case, division) for division in (True, False))
    for means, sums in zip(averaged, summed, strict=True):
        assert [name for name, _ in means] == [name for name, _ in sums]
        for (_, by_mean), (_, by_sum) in zip(means, sums, strict=True):
            torch.testing.assert_close(by_sum, by_mean * world_size, rtol=1e-5, atol=1e-6)
    assert any(bool(change.any()) for answer in averaged for _, change in answer)


STATE = {"rowwise_adagrad_decoupled": "momentum1", "partial_rowwise_adam": "exp_avg_sq", "lamb": "", "lars_sgd": ""}
"""The state of each rule that has a number per row."""


def trained(rank: int, world_size: int, case: Case) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The state after three steps, and what the report says."""
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 3)
    return whole_state(model), {reason.code for reason in recfx.explain(model).reasons}


@pytest.mark.parametrize("rule", STATE)
def test_each_block_of_columns_trains_like_a_table_of_its_own(rule: str) -> None:
    case = case_of("columns", None, rule)
    whole: Any = make(case, 0)
    halves = {table.name: (f"{table.name}_left", f"{table.name}_right") for table in case.tables}
    cut = replace(
        case,
        tables=tuple(
            replace(table, name=name, dim=table.dim // 2, sharding=("table_wise", 0))
            for table in case.tables
            for name in halves[table.name]
        ),
    )
    oracle: Any = make(cut, 0)
    for table in case.tables:
        blocks = whole.sparse.weight(table.name).detach().chunk(2, dim=1)
        for name, block in zip(halves[table.name], blocks, strict=True):
            oracle.sparse.weight(name).data.copy_(block)
    train(oracle, cut, 0, 0, 0, 3)
    expected = whole_state(oracle)
    for state, codes in ranks(2).run(trained, case):
        assert "optimizer_state_per_column_block" in codes
        for table in case.tables:
            key = f"embedding_bags.{table.name}.weight"
            parts = [expected[f"sparse.embedding_bags.{name}.weight"] for name in halves[table.name]]
            torch.testing.assert_close(state[f"sparse.{key}"], torch.cat(parts, dim=1), rtol=1e-4, atol=1e-6)
            if STATE[rule]:
                parts = [expected[f"embedding_bags.{name}.weight/{name}.{STATE[rule]}"] for name in halves[table.name]]
                sums = state[f"{key}/{table.name}.{STATE[rule]}"]
                torch.testing.assert_close(sums, torch.cat(parts), rtol=1e-4, atol=1e-6)


CASE = Case(
    (
        Table("a", 24, 12, ("f0", "f1"), "MEAN", ("column_sizes", 4, 8)),
        Table("b", 20, 20, ("f1",), "SUM", ("column_sizes", 4, 16)),
        Table("c", 24, 16, ("f2",), "MEAN", ("column_sizes", 12, 4)),
    ),
    optimizer="adagrad",
)
SEQUENCES = Case(
    (
        Table("a", 24, 20, ("f0", "f1"), "SUM", ("column_sizes", 4, 16)),
        Table("b", 20, 20, ("f1",), "SUM", ("column_sizes", 12, 8)),
        Table("c", 24, 20, ("f2",), "SUM", ("column_sizes", 8, 12)),
    ),
    optimizer="adagrad",
    is_pooled=False,
)
OF_BOTH_KINDS = pytest.mark.parametrize("of_kind", [CASE, SEQUENCES], ids=["pooled", "sequence"])


@OF_BOTH_KINDS
def test_adopted(of_kind: Case) -> None:
    check(of_kind, 2, ranks(2).run(train_sharded, of_kind))


@OF_BOTH_KINDS
@pytest.mark.parametrize("admit_after", [1, 2])
def test_hashed_means_are_divided_by_the_lengths_of_their_own_bags(admit_after: int, of_kind: Case) -> None:
    hashing = recfx.HashConfig(dense_rows=0, admit_after=admit_after)
    case = replace(of_kind, hashing=hashing, raw_ids=10)
    expected, whole = train_whole(case, 2)
    answers = ranks(2).run(train_sharded, case)
    check(case, 2, answers, expected=expected)
    for answer in answers:
        for name, (_, index) in answer["indexes"].items():
            assert torch.equal(index["row_ids"], whole.index(name).row_ids)


def cut(*sharding: tuple[Any, ...]) -> Case:
    tables = tuple(replace(table, sharding=kind) for table, kind in zip(CASE.tables, sharding, strict=True))
    return replace(CASE, tables=tables, optimizer="rowwise_adagrad")


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """The sums of each table's optimizer. Collective."""
    return {name.split(".")[0]: value for name, value in tables_of(model).items() if name.endswith(".optimizer.sum")}


def save(rank: int, world_size: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 1)
    recfx.save_checkpoint(model, folder)
    return gathered(model)


def load(rank: int, world_size: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    model = make(case, world_size, seed=5)
    recfx.load_checkpoint(model, folder)
    return gathered(model)


def test_sums_of_blocks_become_their_mean_weighted_by_columns(tmp_path: Path) -> None:
    """After one step that is what the uncut table has, wherever it is gathered or loaded."""
    uneven = cut(("column_sizes", 4, 8), ("column_sizes", 4, 16), ("column_sizes", 12, 4))
    folder = str(tmp_path)
    whole = make(uneven, 0)
    train(whole, uneven, 0, 0, 0, 1)
    expected = gathered(whole)
    answers = ranks(2).run(save, uneven, folder)
    answers += ranks(2).run(load, cut(("row_wise",), ("table_wise", 1), ("column_sizes", 8, 8)), folder)
    for answer in [*answers, load(0, 0, uneven, folder)]:
        for name, value in expected.items():
            torch.testing.assert_close(answer[name], value, rtol=1e-4, atol=1e-6)


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
