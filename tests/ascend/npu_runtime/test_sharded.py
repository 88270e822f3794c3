"""Tables sharded over two NPUs, with gloo's collectives under HCCL's name, against the unsharded model on the CPU."""

from dataclasses import replace

import pytest
import torch
from torchrec.optim.optimizers import in_backward_optimizer_filter

import recfx
from recfx.errors import RecfxError
from recfx.ir import format_graph
from tests.ascend.npu_runtime.sharded_training import model_on_npus, train_on_npus
from tests.sharding.cases import Case, Table, as_sequence, batches, check, deduped, train_whole
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import FOUR_LARGER, TYPES, hashed_case, one_type

MIXED = (
    Table("a", 11, 8, ("f0",), "SUM", ("row_wise",)),
    Table("b", 13, 16, ("f1", "f0"), "MEAN", ("column_wise", 1, 0)),
    Table("c", 9, 8, ("f2",), "SUM", ("table_wise", 1)),
    Table("d", 7, 8, ("f1",), "MEAN", ("data_parallel",)),
)
STATIC = {
    **{kind: one_type(kind, optimizer="adagrad") for kind in TYPES},
    **{f"mixed_{optimizer}": Case(MIXED, optimizer=optimizer) for optimizer in ("sgd", "adagrad")},
    "row_wise_rowwise_adagrad": one_type("row_wise", optimizer="rowwise_adagrad"),
    "mixed_dense": Case(MIXED, kernel="dense"),
    "uneven": Case(MIXED, optimizer="adagrad", sizes=(4, 1)),
    "weighted": one_type("row_wise", optimizer="adagrad", is_weighted=True),
    "sequence": as_sequence(Case(MIXED, optimizer="adagrad")),
    "sequence_uneven": as_sequence(Case(MIXED, sizes=(4, 1))),
    "sequence_dense": as_sequence(Case(MIXED, kernel="dense")),
}
HASHED = {
    f"{kind}_{config}": hashed_case(kind, config)
    for kind, config in (
        ("row_wise", "lru"),
        ("table_wise", "lfu_admit"),
        ("column_wise", "error"),
        ("data_parallel", "error"),
    )
}
HASHED |= {f"sequence_{name}": as_sequence(HASHED[name]) for name in ("row_wise_lru", "data_parallel_error")}
HASHED["sequence_mixed"] = as_sequence(replace(HASHED["row_wise_lru"], tables=FOUR_LARGER))


WAYS = pytest.mark.parametrize("ids_on_host", [False, True], ids=["ids_on_npus", "ids_on_host"])


@pytest.mark.parametrize("name", STATIC)
def test_static(name: str) -> None:
    check(STATIC[name], 2, ranks(2, "hccl").run(train_on_npus, STATIC[name]))


@WAYS
@pytest.mark.parametrize("name", HASHED)
def test_hashed(name: str, ids_on_host: bool) -> None:
    answers = ranks(2, "hccl").run(train_on_npus, HASHED[name], ids_on_host)
    expected, _ = train_whole(HASHED[name], 2)
    check(HASHED[name], 2, answers, expected=expected)


SENT_ONCE = deduped(Case(MIXED, optimizer="adagrad", sizes=(4, 1)))


@WAYS
def test_different_ids_are_sent_once_where_the_host_sends_them(ids_on_host: bool) -> None:
    check(SENT_ONCE, 2, ranks(2, "hccl").run(train_on_npus, SENT_ONCE, ids_on_host))
    for codes, graph in ranks(2, "hccl").run(said_of_dedup, ids_on_host):
        assert codes == ([] if ids_on_host else ["dedup_on_device"] * len(MIXED))
        assert graph.count("= dedup_ids(") == int(ids_on_host)


def said_of_dedup(rank: int, world_size: int, ids_on_host: bool) -> tuple[list[str], str]:
    model = model_on_npus(SENT_ONCE, world_size, torch.device("npu", rank), ids_on_host)
    (report,) = recfx.explain(model.sparse).collections
    codes = [decline.code for decline in report.declined if decline.code.startswith("dedup")]
    return codes, format_graph(model.sparse.graph_module)


def move_away_and_back(rank: int, world_size: int) -> tuple[str, int]:
    case, device = HASHED["table_wise_lfu_admit"], torch.device("npu", rank)  # all tables are on one rank
    collection = model_on_npus(case, world_size, device, ids_on_host=False).sparse
    first, second = (step[rank].to(device) for step in batches(case, world_size, 2))
    collection(first).values().sum().backward()
    collection.to("cpu")
    with pytest.raises(RecfxError) as caught:
        collection(second).values()
    collection.to(device)
    collection(second).values().sum().backward()
    return caught.value.reason, len(list(in_backward_optimizer_filter(collection.named_parameters(), include=True)))


def test_tables_that_move_to_the_host_are_refused_until_they_are_back() -> None:
    """By all ranks, even one that has no table."""
    expected = [("refused_on_another_rank", 0), ("sharded_tables_moved", 2)]
    assert ranks(2, "hccl").run(move_away_and_back) == expected


@WAYS
@pytest.mark.parametrize("name", ["mixed_adagrad", *HASHED])
def test_a_pipeline_changes_no_bit(name: str, ids_on_host: bool) -> None:
    case = {**STATIC, **HASHED}[name]
    expected, piped = (ranks(2, "hccl").run(train_on_npus, case, ids_on_host, pipeline) for pipeline in (False, True))
    for mine, other in zip(piped, expected, strict=True):
        assert all(map(torch.equal, mine["pooled"], other["pooled"]))
        assert torch.equal(mine["over"], other["over"])
        for (*_, one), (*_, two) in zip(mine["shards"], other["shards"], strict=True):
            assert torch.equal(one, two)
        assert mine["indexes"].keys() == other["indexes"].keys()
        for index, state in mine["indexes"].items():
            assert all(torch.equal(value, other["indexes"][index][key]) for key, value in state.items())
