"""Hashing is elided where ids are declared to be rows."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

import recfx
from recfx.errors import IdRangeError
from recfx.ir import format_graph
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Model, Table, batches, build, plan_of, with_optimizer
from tests.sharding.ranks import on_ranks
from tests.support.refusals import refused

ROWS, SPARE = 100, recfx.HashConfig(rows=150)  # ids below 100 are rows, and 50 rows are given out by an index


class Reduced(nn.Module):
    """Ids of two features are made small before they reach the collection; pooled as SUM and as MEAN."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, embedding_dim=4, num_embeddings=ROWS, feature_names=[feature], pooling=pooling
            )
            for name, feature, pooling in (("a", "f", PoolingType.SUM), ("b", "g", PoolingType.MEAN))
        ]
        self.ebc = EmbeddingBagCollection(tables=tables)
        self.divisor = ROWS

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        ids = features.values() % self.divisor
        return self.ebc(KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())).values()


RANGES = {"f": (0, ROWS - 1), "g": (0, ROWS - 1)}


def batch(*ids: int) -> KeyedJaggedTensor:
    """Half of the ids for each feature."""
    return KeyedJaggedTensor(["f", "g"], torch.tensor(ids), lengths=torch.tensor([len(ids) // 2] * 2))


SAMPLE = (batch(7, 2**40, -5, 12),)


def kinds(model: Any) -> list[str]:
    return [
        str(node.target) for node in model.get_submodule("ebc").graph_module.graph.nodes if node.op == "call_module"
    ]


def test_hashing_is_left_out_where_ids_are_rows() -> None:
    torch.manual_seed(0)
    model = Reduced()
    hashed = recfx.convert(copy.deepcopy(model), SAMPLE, hashing=SPARE)
    elided = recfx.convert(model, SAMPLE, hashing=SPARE, id_ranges=RANGES)
    for converted in (elided, hashed):
        attach(converted, torch.optim.SGD, lr=0.5)
    assert kinds(elided) == ["select_features", "lookup", "lookup_1", "keyed_tensor"]
    assert "hash_lookup" in kinds(hashed)
    assert "mean_divide" in kinds(hashed)
    for ids in ((7, 2**40, -5, 12), (99, 100, 101, -1), (0, 0, -(2**63), 2**63 - 1)):
        outputs = [converted(batch(*ids)) for converted in (elided, hashed)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.sum().backward()
    torch.testing.assert_close(dict(elided.named_parameters()), dict(hashed.named_parameters()))
    assert elided.state_dict().keys() == hashed.state_dict().keys()
    assert recfx.explain(elided).collections[0].declined == ()


@pytest.mark.parametrize(
    ("declared", "hashing"),
    [
        ((0, ROWS), SPARE),  # id 100 would be a raw one
        ((-1, ROWS - 1), SPARE),  # ids below 0 would be raw ones
        ((0, ROWS - 1), recfx.HashConfig(rows=150, dense_rows=ROWS - 1)),
        ((0, ROWS - 1), recfx.HashConfig(rows=150, admit_after=2)),  # the index counts all ids
        ((0, ROWS - 1), recfx.HashConfig(rows=150, on_full="evict")),
    ],
)
def test_hashing_stays_where_one_id_may_be_raw(declared: tuple[int, int], hashing: recfx.HashConfig) -> None:
    converted = recfx.convert(Reduced(), hashing=hashing, id_ranges={"f": declared, "g": declared})
    assert any(kind.startswith(("hash_ids", "hash_lookup")) for kind in kinds(converted))
    declined = recfx.explain(converted).collections[0].declined
    assert [one.code for one in declined].count("has_index") == 2


def test_one_table_of_two() -> None:
    hashing = {"a": SPARE, "b": recfx.HashConfig(dense_rows=0)}
    converted = recfx.convert(Reduced(), hashing=hashing, id_ranges=RANGES)
    assert "hashed=[b]" in format_graph(converted.ebc.graph_module)
    one = recfx.convert(Reduced(), hashing=SPARE, id_ranges=RANGES | {"g": (0, 100)})
    assert "hashed=[b]" in format_graph(one.ebc.graph_module)


def test_each_batch_is_checked() -> None:
    converted = recfx.convert(Reduced(), hashing=SPARE, id_ranges=RANGES)
    converted.divisor = 1000
    converted(batch(99, 0, 99, 0))
    with refused("id_out_of_range", error=IdRangeError):
        converted(batch(0, 100, 0, 0))


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ([("f", (0, 9))], "invalid_argument"),
        ({"f": 9}, "invalid_argument"),
        ({"f": (0, 9, 10)}, "invalid_argument"),
        ({"f": (0, 9.5)}, "invalid_argument"),
        ({"f": (9, 0)}, "invalid_argument"),
        ({1: (0, 9)}, "invalid_argument"),
        ({"user": (0, 9)}, "unknown_feature"),
    ],
)
def test_wrong_declarations(declared: Any, reason: str) -> None:
    model = Reduced()
    with refused(reason):
        recfx.convert(model, id_ranges=declared)
    assert type(model.ebc) is EmbeddingBagCollection


def test_an_exported_file_has_no_index_in_its_graph_and_checks_ids(tmp_path: Path) -> None:
    converted = recfx.convert(Reduced(), hashing=SPARE, id_ranges=RANGES).eval()
    report = recfx.export(converted, tmp_path / "model.pt", SAMPLE)
    assert "find_rows" not in report.graph
    loaded = recfx.load(tmp_path / "model.pt")
    other = batch(99, 100, -1, 2**50)
    torch.testing.assert_close(loaded(other), converted(other))


@on_ranks(2)
def test_shards_keep_their_index(rank: int, world_size: int) -> None:
    case = Case((Table("t", 64, 8, ("f0",), "SUM", ("row_wise",)),), hashing=recfx.HashConfig(dense_rows=48))
    standard, width = build(case)
    model = Model(with_optimizer(case, standard), width)
    model = recfx.convert(model, hashing=case.hashing, id_ranges={"f0": (0, 47)})
    plan = ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan_of(case, model.sparse, world_size))})
    before = model.sparse.tables[0].never_needs_index
    model = recfx.convert(model, plan=plan)
    (step,) = batches(case, world_size, 1)
    model(step[rank])[0].backward()
    assert "hash_lookup" in [node.kind for node in recfx.explain(model).collections[0].nodes]
    assert (before, model.sparse.tables[0].never_needs_index) == (True, False)
