"""``state_dict`` and ``load_state_dict`` of sharded collections."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

import recfx
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.gather import gather_tables
from recfx.errors import CheckpointError
from recfx.kernels.index.index_buffers import FREED
from tests.sharding.cases import Case, batches, build, model_and_plan, model_parallel
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import (
    ADMIT,
    LRU,
    PLANS,
    assert_same,
    case_of,
    counted,
    in_kinds,
    load_dcp,
    make,
    model_state,
    optimizer_state,
    save_dcp,
    sharded_of,
    train,
    whole_state,
)
from tests.support.pairwise import pairwise


def plain_state(case: Case, steps: int = 3) -> dict[str, torch.Tensor]:
    """The state of the unsharded model and of its optimizer, after some steps."""
    model = make(case, 0)
    train(model, case, 0, 0, 0, steps)
    return whole_state(model)


@on_ranks(2)
def test_a_model_that_was_converted_in_place_has_the_state_of_a_copy(rank: int, world_size: int) -> None:
    """The classes in the state of a model that was converted as a copy, and of one that was in place."""
    case = case_of("rows", LRU)
    states = []
    for inplace in (False, True):
        model, plan = model_and_plan(case, world_size, is_converted=False)
        sharded: Any = recfx.convert(model, hashing=case.hashing, plan=plan, inplace=inplace)
        states.append(sharded.state_dict() | dict.fromkeys(sharded.fused_optimizer.params, 0))
    copied, in_place = ({key: type(value) for key, value in state.items()} for state in states)
    assert in_place == copied
    assert ShardedTensor in copied.values()


@pytest.mark.parametrize("way", ["copy", "inplace", "copy later", "inplace later", "parallel"])
@on_ranks(2)
def test_hooks_of_a_collection_are_those_of_its_sharded_form(rank: int, world_size: int, way: str) -> None:
    """What runs in a sharded model, in the model that it becomes again, and once the hooks are removed."""
    expected = ["before forward", "state_dict", "before load"]
    case = case_of("rows", None)
    ran: list[tuple[str, nn.Module]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, *rest: ran.append((name, module))

    model, plan = model_and_plan(case, world_size, is_converted=False)
    handles = [
        model.sparse.register_forward_pre_hook(note("before forward")),
        model.sparse._register_state_dict_hook(note("state_dict")),
        model.sparse.register_load_state_dict_pre_hook(note("before load")),
    ]
    sharded: Any = model
    if way in ("copy", "inplace"):
        sharded = recfx.convert(model, hashing=case.hashing, plan=plan, inplace=way == "inplace")
    else:
        recfx.convert(model, hashing=case.hashing, inplace=True)
    if way == "parallel":
        before: Any = model.sparse
        sharded = model_parallel(model, plan)
        assert before.state_dict().keys() == sharded_of(sharded.module).state_dict().keys()
        ran.clear()
    elif sharded is model and way != "inplace":
        sharded = recfx.convert(model, plan=plan, inplace=way == "inplace later")
    noted = []

    def use(used: nn.Module, collection: nn.Module) -> None:
        ran.clear()
        collection(batches(case, world_size, 1)[0][rank])
        used.load_state_dict(used.state_dict())
        assert all(module is collection for _, module in ran)
        noted.append([name for name, _ in ran])

    use(sharded, sharded_collections(sharded).popitem()[1])
    plain: Any = recfx.unconvert(sharded, with_mapping=True)[0]
    use(plain, plain.sparse)
    for handle in handles:
        handle.remove()
    use(sharded, sharded_collections(sharded).popitem()[1])
    sharded, plain, without = noted
    assert sharded == plain == expected
    assert without == (expected if "copy" in way else [])


@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("of_kind", ["pooled", "sequence"])
@on_ranks(2)
def test_keys_sizes_and_dtypes_are_those_of_the_unsharded_collection(
    rank: int, world_size: int, plan: str, of_kind: str
) -> None:
    case = in_kinds(case_of(plan, ADMIT))[of_kind]
    expected = make(case, 0).get_submodule("sparse").state_dict()
    replicated = {table.name for table in case.tables if table.sharding[0] == "data_parallel"}
    sparse = sharded_of(make(case, world_size))
    state = sparse.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        size, dtype = state[key].shape, state[key].dtype
        if key.split(".")[1] not in replicated and not key.endswith(".identity"):
            metadata = state[key].metadata()
            assert all(0 not in shard.shard_sizes for shard in metadata.shards_metadata)
            size, dtype = metadata.size, metadata.tensor_properties.dtype
        assert (size, dtype) == (value.shape, value.dtype), key


def one_rank_alone(rank: int, world_size: int, case: Case) -> int:
    sparse = sharded_of(make(case, world_size))
    return len(sparse.state_dict()) if rank == 0 else 0


def test_state_dict_is_no_collective() -> None:
    assert ranks(2).run(one_rank_alone, case_of("rows"))[0] > 0


def load_plain(
    rank: int, world_size: int, case: Case, state: dict[str, Any], with_optimizer: bool, steps: int = 1
) -> dict[str, Any]:
    """Into a model that was trained for so many steps."""
    model = make(case, world_size, seed=7)
    train(model, case, rank, world_size, 0, steps)
    sparse = sharded_of(model)
    sparse.load_state_dict(model_state(state), strict=True)
    if with_optimizer:
        sparse.fused_optimizer.load_state_dict(optimizer_state(state))
        steps = [optimizer.state["step"] for optimizer in sparse.store.optimizers.values() if optimizer.rule.saves_step]
        assert {float(step) for step in steps} <= {3.0}  # of every shard
    again = make(case, world_size, seed=8)
    sharded_of(again).load_state_dict(sparse.state_dict())
    assert_same(model_state(whole_state(again)), model_state(whole_state(model)))
    return whole_state(model)


@pairwise(plan=["columns", "mixed", "rows"], kind=["pooled", "sequence"])
def test_fewer_rows_fill_as_in_the_unsharded_collection(plan: str, kind: str) -> None:
    """Into one that had more ids: their rows are marked as used before, and the sums of Adagrad start anew."""
    case, steps = in_kinds(case_of(plan, ADMIT, "adagrad_from_a_half"))[kind], 5
    smaller = replace(ADMIT, rows=ADMIT.rows - 11)  # type: ignore[operator]
    state = plain_state(replace(case, hashing=smaller))
    whole = make(case, 0, seed=7)
    train(whole, case, 0, 0, 0, steps)
    sparse: Any = whole.get_submodule("sparse")
    sparse.load_state_dict(model_state(state))
    sparse.fused_optimizer.load_state_dict(optimizer_state(state))
    assert all(bool((sparse.index(table.name).row_state == FREED).any()) for table in case.tables)
    for loaded in ranks(2).run(load_plain, case, state, True, steps):
        for name, expected in whole_state(whole).items():
            if name.endswith(".weight"):  # rows without an id keep their weights, which trained a little differently
                torch.testing.assert_close(loaded[name], expected, rtol=1e-4, atol=1e-5)
            elif not name.endswith(".counts"):
                assert torch.equal(loaded[name], expected), name


def test_a_state_without_index_empties_it() -> None:
    case = replace(case_of("mixed"), hashing=recfx.HashConfig(dense_rows=0, rows=80, buckets=4, on_full="evict"))
    smaller, _ = build(replace(case, seed=3))
    standard = {key: value.clone() for key, value in smaller.state_dict().items()}
    for loaded in ranks(2).run(load_plain, case, standard, False):
        for key, value in standard.items():
            assert torch.equal(loaded[f"sparse.{key}"][:48], value)
        states = [value for key, value in loaded.items() if key.endswith(".row_state")]
        assert states
        assert not any(bool(value.any()) for value in states)


Refused = tuple[str, str, bool]


def refuse(rank: int, world_size: int, case: Case, saved_case: Case, damage: str, state: dict[str, Any]) -> Refused:
    """Load what must be refused into a whole model; the reason, the path, and whether anything has changed."""
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 2)
    source = make(saved_case, world_size, seed=3)
    saved: dict[str, Any] = dict(source.state_dict())
    if state:
        saved.update({f"over.{key}": torch.zeros_like(v) for key, v in model.over.state_dict().items()})  # type: ignore[operator, union-attr]
        saved.update({f"sparse.{key}": value.clone() for key, value in model_state(state).items()})
    if damage == "torn_slices":
        for shard in saved["sparse.hash_indexes.a.row_state"].local_shards():
            shard.tensor[-1] = 9
    elif damage == "whole_weight":
        saved["sparse.embedding_bags.a.weight"] = torch.ones(80, 8)
    elif damage == "torn":
        saved["sparse.hash_indexes.d.row_state"][-1] = 9
    elif damage == "shape":
        saved["sparse.embedding_bags.d.weight"] = saved["sparse.embedding_bags.d.weight"][:, :-1]
    elif damage == "no_weight":
        del saved["sparse.embedding_bags.d.weight"]
    before = whole_state(model), model.over.weight.clone()  # type: ignore[operator, union-attr]
    with pytest.raises(CheckpointError) as caught:
        model.load_state_dict(saved)
    assert_same(whole_state(model), before[0])
    return caught.value.reason, caught.value.module_path, torch.equal(model.over.weight, before[1])  # type: ignore[arg-type, union-attr]


SEEDED, WHOLE = replace(LRU, seed=99), "whole tensors"


@pytest.mark.parametrize(
    ("plan", "saved", "hashing", "damage", "reason", "path"),
    [
        ("mixed", WHOLE, LRU, "torn", "torn_state", "d"),
        ("mixed", WHOLE, replace(LRU, rows=69), "torn", "torn_state", "d"),
        ("mixed", WHOLE, replace(LRU, rows=69), "shape", "columns_mismatch", "d"),
        ("mixed", WHOLE, LRU, "no_weight", "torn_state", "d"),
        ("mixed", WHOLE, None, "shape", "shape_mismatch", "sparse.embedding_bags.d.weight"),
        ("mixed", "columns", LRU, "", "other_plan", "sparse.hash_indexes.a.row_ids"),
        ("mixed", "columns", None, "", "other_plan", "sparse.embedding_bags.a.weight"),
        ("replicas", "rows", LRU, "", "other_plan", "sparse.hash_indexes.a"),
        ("rows", "rows", LRU, "whole_weight", "other_plan", "sparse.hash_indexes.a"),
        ("rows", "rows", LRU, "torn_slices", "torn_state", "a"),
        ("rows", "rows", SEEDED, "", "wrong_seed", "a"),
    ],
)
def test_what_is_refused_changes_nothing_on_any_rank(
    plan: str, saved: str, hashing: recfx.HashConfig | None, damage: str, reason: str, path: str
) -> None:
    """Also where tables before it have more rows than were saved."""
    case = case_of(plan, hashing and LRU)
    state = plain_state(case_of(plan, hashing)) if saved == WHOLE else {}
    saved_case = case if saved == WHOLE else case_of(saved, hashing)
    assert ranks(2).run(refuse, case, saved_case, damage, state) == [(reason, path, True)] * 2


def missing(rank: int, world_size: int, case: Case, state: dict[str, Any]) -> list[str]:
    sparse = sharded_of(make(case, world_size))
    saved = {key: value for key, value in model_state(state).items() if ".b." not in key}
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        sparse.load_state_dict(saved)
    assert str(caught.value).count('"embedding_bags.b.weight"') == 1
    result = sparse.load_state_dict({**saved, "unknown": torch.zeros(1)}, strict=False)
    return [*sorted(result.missing_keys), *result.unexpected_keys]


def test_missing_keys_are_missing_on_all_ranks() -> None:
    case = case_of("columns")
    state = plain_state(case, 1)
    first, second = ranks(2).run(missing, case, state)
    assert first[-1] == second[-1] == "unknown"
    names = [key for key in state if key.startswith("sparse.") and ".b." in key]
    assert len(names) > 3
    expected = sorted(key.removeprefix("sparse.") for key in names)
    assert first[:-1] == expected  # once each, and none by the name of a shard
    assert second[:-1] == expected


def assigned(rank: int, world_size: int, case: Case, state: dict[str, Any]) -> dict[str, Any]:
    """What is assigned is this model's own, however it was stored, and training it leaves the saved state alone."""
    model = make(case, world_size, seed=7)
    saved = model_state(state)
    for key in saved:
        if key.endswith(".weight"):
            saved[key] = saved[key].t().contiguous().t()
    sharded_of(model).load_state_dict(saved, assign=True)
    sharded_of(model).fused_optimizer.load_state_dict(optimizer_state(state))
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    before, loaded = {key: value.clone() for key, value in saved.items()}, whole_state(model)
    train(model, case, rank, world_size, 3, 5)
    for key, value in saved.items():
        assert torch.equal(value, before[key]), key
    return loaded


@pytest.mark.parametrize("plan", ["columns", "mixed", "tables"])
def test_a_state_can_be_assigned(plan: str) -> None:
    case = case_of(plan)
    state = plain_state(case)
    for loaded in ranks(2).run(assigned, case, state):
        assert_same(loaded, state)


def in_place(rank: int, world_size: int, case: Case) -> str:
    """What torch.distributed.checkpoint does with the state of another table."""
    sparse = sharded_of(make(case, world_size))
    sparse.state_dict()["hash_indexes.a.identity"].add_(1)
    sparse.state_dict()["hash_indexes.a.row_ids"].local_shards()[0].tensor.add_(0)
    with pytest.raises(CheckpointError) as caught:
        len(sparse.index("a"))
    return caught.value.reason


def test_whose_index_it_is_is_loaded_in_place_as_well() -> None:
    assert len(set(ranks(2).run(in_place, case_of("rows")))) == 1


ROWS = case_of("rows", ADMIT)
"""The first rank has the dense rows of table ``a`` as well."""


def shares(rank: int, world_size: int, case: Case, saved: str, how: str) -> dict[str, list[int]]:
    model = make(case, world_size)
    if how == "plain":
        sharded_of(model).load_state_dict(torch.load(saved))
    elif how == "checkpoint":
        recfx.load_checkpoint(model, saved)
    else:
        load_dcp(model, saved, in_place=how == "dcp in place")
    return counted(model)


def saved_by(rank: int, world_size: int, case: Case, folder: str) -> dict[str, list[int]]:
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 4)
    recfx.save_checkpoint(model, f"{folder}/checkpoint")
    save_dcp(model, f"{folder}/dcp")
    if not world_size:
        torch.save(model.get_submodule("sparse").state_dict(), f"{folder}/plain")
        return {}
    return {name: table.index["counts"].tolist() for name, table in gather_tables(sharded_of(model)).items()}


@pytest.mark.parametrize("worlds", [(0, 3), (4, 2)])
def test_what_was_counted_stays_in_sum_in_another_world(worlds: tuple[int, int], tmp_path: Path) -> None:
    before, after = worlds
    folder = str(tmp_path)
    sums = ranks(before).run(saved_by, case_of("rows", ADMIT, world_size=before), folder) if before else []
    if not before:
        saved_by(0, 0, ROWS, folder)
        state = torch.load(f"{folder}/plain")
        sums = [{name: state[f"hash_indexes.{name}.counts"].tolist() for name in "abd"}]
    ways = {"checkpoint": "checkpoint", "dcp": "dcp", "dcp in place": "dcp"} | ({} if before else {"plain": "plain"})
    for how, file in ways.items():
        case = case_of("rows", ADMIT, world_size=after)
        counts_of_ranks = ranks(after).run(shares, case, f"{folder}/{file}", how)
        for name in "abd":
            of_ranks = [counts[name] for counts in counts_of_ranks]
            assert [sum(column) for column in zip(*of_ranks, strict=True)][1:] == sums[0][name][1:], (how, name)
            assert {counts[0] for counts in of_ranks} == {4}
