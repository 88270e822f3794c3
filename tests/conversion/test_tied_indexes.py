"""Tables of one weight in two collections, with raw ids: one index, one row per id, one step with all gradients."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

import recfx
from recfx.collections.sharding.collection import shard_collection
from tests.builders.collections import sequence_table, table, tables_named
from tests.builders.optimizers import OPTIMIZERS, attach
from tests.support.refusals import refused

ROWS, DIM = 40, 4
RAW = recfx.HashConfig(dense_rows=0, buckets=1)
POOLED, SEQUENCE = "ebc.embedding_bags.goods", "ec.embeddings.history"


class Tied(nn.Module):
    """``goods`` and ``history`` are one weight; the pooled one, or the other one, is looked up first."""

    def __init__(self, pooled_first: bool = True, **of_history: Any) -> None:
        super().__init__()
        self.pooled_first = pooled_first
        self.ebc = EmbeddingBagCollection(
            [table("goods", ["item"], rows=ROWS, dim=DIM), table("users", ["user"], rows=ROWS, dim=DIM)]
        )
        self.ec = EmbeddingCollection([sequence_table("history", ["seen"], rows=ROWS, dim=DIM, **of_history)])
        self.ec.embeddings["history"].weight = self.ebc.embedding_bags["goods"].weight

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.pooled_first:
            pooled, rows = self.ebc(features).values(), self.ec(features)["seen"].values()
        else:
            rows, pooled = self.ec(features)["seen"].values(), self.ebc(features).values()
        scale = torch.ones_like(rows).flatten().cumsum(0).view_as(rows) / 8 - 1
        return pooled.square().sum() + (rows * scale).sum() + (pooled[:, :DIM].sum() * rows.sum())


def batch(items: list[int], users: list[int], seen: list[int]) -> KeyedJaggedTensor:
    """One sample."""
    ids = torch.tensor([*items, *users, *seen], dtype=torch.int64)
    return KeyedJaggedTensor(["item", "user", "seen"], ids, lengths=torch.tensor([len(items), len(users), len(seen)]))


def batch_number(number: int) -> KeyedJaggedTensor:
    """Some ids in both, some in either, some again and again; others are new."""
    new = [10**10 + 5 * number + step for step in range(5)]
    return batch([7, *new[:3], 7], [1, number], [new[4], 7, *new[1:3], 7, -3])


def built(optimizer: str | None = "adagrad", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Tied(**options)
    if optimizer is not None:
        attach(model, optimizer)
    return model


def tied(optimizer: str | None = "adagrad", hashing: Any = RAW, **options: Any) -> Any:
    return recfx.convert(built(optimizer, **options), hashing=hashing)


def assert_tied(model: Any) -> None:
    assert model.ebc.index("goods") is model.ec.index("history")
    assert model.ebc.weight("goods") is model.ec.weight("history")


@pytest.mark.parametrize("pooled_first", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_a_tied_model_that_gets_the_rows(optimizer: str, pooled_first: bool) -> None:
    plain, model = built(optimizer, pooled_first=pooled_first), tied(optimizer, pooled_first=pooled_first)
    if optimizer == "adam":  # the dense one also moves rows that a batch does not read
        plain = recfx.convert(plain)
    expected = dict(plain.named_parameters())
    rows_given_out = {name: set[int]() for name in ("goods", "users")}
    for number in range(5):
        features = batch_number(number)
        with torch.no_grad():
            model(features)
            for name, before in rows_given_out.items():  # rows that are new have their initial weights
                rows = model.ebc.index(name).items()[1]
                fresh = rows[[row not in before for row in rows.tolist()]]
                expected[f"ebc.embedding_bags.{name}.weight"][fresh] = model.ebc.weight(name)[fresh]
                before.update(fresh.tolist())
        keys = {"item": model.ebc.index("goods"), "user": model.ebc.index("users"), "seen": model.ec.index("history")}
        rows_of = [keys[key].find(jagged.values()) for key, jagged in features.to_dict().items()]
        losses = model(features), plain(KeyedJaggedTensor(list(keys), torch.cat(rows_of), lengths=features.lengths()))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for loss in losses:
            loss.backward()
        for name, before in rows_given_out.items():
            rows = torch.tensor(sorted(before))
            theirs = expected[f"ebc.embedding_bags.{name}.weight"][rows]
            torch.testing.assert_close(model.ebc.weight(name)[rows], theirs, rtol=1e-5, atol=1e-6)
    assert_tied(model)
    assert len(model.ec.index("history")) == len(
        {7, -3, *range(10**10, 10**10 + 25)} - {10**10 + 5 * n + 3 for n in range(5)}
    )


def test_rows_follow_the_calls_and_initial_weights_do_not() -> None:
    """An id's weights do not depend on which table sees it first."""
    features = batch([5, 6], [1], [8, 6, 9])
    first, second = tied(None, pooled_first=True), tied(None, pooled_first=False)
    for model, ids in ((first, [5, 6, 8, 9]), (second, [8, 6, 9, 5])):
        with torch.no_grad():
            model(features)
        assert model.ec.index("history").items()[0].tolist() == ids
        assert model.ec.index("history").counters["batches"] == 2
    rows = [
        model.ec.weight("history")[model.ec.index("history").find(torch.tensor([5, 6, 8, 9]))]
        for model in (first, second)
    ]
    assert torch.equal(*rows)


def test_states_and_copies_stay_tied(tmp_path: Path) -> None:
    model = tied()
    model(batch_number(0)).backward()
    state = model.state_dict()
    for name in ("row_ids", "row_state", "counts"):
        pair = (state[f"ebc.hash_indexes.goods.{name}"], state[f"ec.hash_indexes.history.{name}"])
        assert pair[0].data_ptr() == pair[1].data_ptr()
    loaded, restored = tied(), tied()
    loaded.load_state_dict(copy.deepcopy(state))
    recfx.save_checkpoint(model, tmp_path / "saved")
    recfx.load_checkpoint(restored, tmp_path / "saved")
    others = [loaded, restored, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in others:
        assert_tied(other)
        assert torch.equal(other.eval()(batch_number(0)), model.eval()(batch_number(0)))
        before = len(model.ec.index("history"))
        with torch.no_grad():
            other.train()(batch([123456], [], [123456]))
        assert len(other.ec.index("history")) == before + 1
        assert len(model.ec.index("history")) == before
    more = tied(hashing=dataclasses.replace(RAW, rows=2 * ROWS), optimizer=None)
    more.load_state_dict(copy.deepcopy(state))
    assert_tied(more)
    assert torch.equal(more.eval()(batch_number(0)), model.eval()(batch_number(0)))


def test_two_saved_indexes_do_not_become_one(tmp_path: Path) -> None:
    model, other = tied(None), tied(None)
    other.ec = copy.deepcopy(other.ec)  # with a weight and an index of its own
    with torch.no_grad():
        model(batch_number(0)), other(batch_number(1))
    before = copy.deepcopy(model.state_dict())
    recfx.save_checkpoint(other, tmp_path / "saved")
    for load in (
        lambda: model.load_state_dict(other.state_dict()),
        lambda: model.load_state_dict(other.state_dict(), assign=True),
        lambda: recfx.load_checkpoint(model, tmp_path / "saved"),
    ):
        with refused("tied_tables", "ec.history", match="one weight and so one index", error=recfx.CheckpointError):
            load()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert_tied(model)


def test_rows_after_those_of_a_trained_weight_are_given_out() -> None:
    model = tied(None, recfx.HashConfig(rows=60))
    assert_tied(model)
    assert [table.num_embeddings for table in (model.ebc.embedding_bags["goods"], model.ec.embeddings["history"])] == [
        60,
        60,
    ]
    with torch.no_grad():
        model(batch([3, ROWS], [1], [ROWS - 1, -8]))
    assert model.ec.index("history").items()[0].tolist() == [ROWS, -8]
    assert model.ec.index("history").find(torch.tensor([3, ROWS - 1])).tolist() == [3, ROWS - 1]


def test_a_batch_that_is_refused_is_undone_in_both() -> None:
    """``goods`` and ``history`` have given out rows before ``users`` finds that it is full."""
    model = tied(hashing={"goods": RAW, "history": RAW, "users": RAW}, pooled_first=False)
    model(batch_number(0)).backward()
    before = copy.deepcopy(model.state_dict())
    with refused("table_full", error=recfx.TableFullError):
        model(batch([77], list(range(100, 200)), [78, 77, 79]))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_it_is_reported_verified_watched_and_exported_once(tmp_path: Path) -> None:
    model = recfx.convert(built(), (batch_number(0),), hashing=RAW)
    (note,) = [reason for reason in recfx.explain(model).reasons if reason.code == "tied_index"]
    assert note.path == POOLED
    assert f"{POOLED}.weight, {SEQUENCE}.weight are one weight" in note.message
    watched = recfx.monitor(model)
    assert watched.tables == (POOLED, "ebc.embedding_bags.users")
    model(batch_number(1)).backward()
    scalars = watched.scalars()
    assert scalars[f"{POOLED}/insert_rate"] == 6 / 11
    model.eval()
    recfx.export(model, tmp_path / "model", (batch_number(1),))
    torch.testing.assert_close(recfx.load(tmp_path / "model")(batch_number(1)), model(batch_number(1)))


def test_a_forecast_counts_batches_and_not_the_lookups_of_each_table() -> None:
    """``users`` has an index of its own, and sees as many new ids per batch."""
    model = tied(None)
    watched = recfx.monitor(model)
    for number in range(20):
        if number == 10:  # by the mean of all batches, then by the latest pace
            before = _forecasts(model)
            watched.scalars()
        with torch.no_grad():
            model(batch([number], [number], [number]))
    watched.scalars()
    after = _forecasts(model)
    assert before["goods"] == before["history"] == before["users"] == (30, 10)
    assert after["goods"] == after["history"] == after["users"] == (20, 20)


def _forecasts(model: nn.Module) -> dict[str, tuple[Any, int]]:
    """For each table, after how many batches it is full, and how many it has seen."""
    tables = [table for part in recfx.explain(model).collections for table in part.tables]
    return {spec.name: (spec.hashing.batches_until_full, spec.hashing.count("batches")) for spec in tables}


def test_unconverted_tables_are_tied() -> None:
    model = tied()
    model(batch_number(0)).backward()
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    assert plain.ebc.embedding_bags["goods"].weight is plain.ec.embeddings["history"].weight
    assert torch.equal(mapping["goods"][0], mapping["history"][0])


def test_rows_that_an_output_layer_reads_are_pointed_out() -> None:
    model = built(None)
    model.head = nn.Linear(DIM, ROWS, bias=False)
    model.head.weight = model.ebc.embedding_bags["users"].weight
    (note,) = [
        reason
        for reason in recfx.explain(recfx.convert(model, hashing=RAW)).reasons
        if reason.code == "rows_read_elsewhere"
    ]
    assert note.message.startswith("head.weight is the weight of ebc.embedding_bags.users")
    adopted = recfx.explain(recfx.convert(model)).reasons
    assert not {"rows_read_elsewhere", "tied_index"} & {reason.code for reason in adopted}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"seed": 3}, "different hashing"),
        ({"on_full": "share"}, "different hashing"),
        (None, "different hashing"),
    ],
)
def test_different_hashing_is_refused(other: dict[str, Any] | None, says: str) -> None:
    history = None if other is None else dataclasses.replace(RAW, **other)
    with refused("tied_tables", match=says):
        tied(hashing={"goods": RAW, "users": RAW, "history": history})


def test_nothing_is_tied_to_the_tables_of_a_collection_that_is_kept() -> None:
    """``b`` has the weight of ``c`` as well, and another hashing, which does not matter: ``a2`` does not fit ``a``."""
    model = nn.ModuleList(tables_named(*names) for names in (["a"], ["b", "a2"], ["c"]))
    model[1].embedding_bags["a2"].weight = model[0].embedding_bags["a"].weight
    model[2].embedding_bags["c"].weight = model[1].embedding_bags["b"].weight
    hashing = {name: dataclasses.replace(RAW, seed=seed) for name, seed in (("a", 0), ("b", 0), ("a2", 1), ("c", 2))}
    converted = recfx.convert(model, hashing=hashing, on_unsupported="keep")
    assert [hasattr(each, "hash_indexes") for each in converted] == [True, False, True]


def test_eviction_and_different_initial_weights_are_refused() -> None:
    with refused("tied_tables", match="has yet to train"):
        tied(hashing=dataclasses.replace(RAW, on_full="evict"))
    for other in ({"weight_init_max": 3.0, "weight_init_min": -3.0}, {"init_fn": nn.init.ones_}):
        model = built(**other)
        with refused("tied_tables", match="different initial weights"):
            recfx.convert(model, hashing=RAW)
        assert recfx.convert(model)(batch([1], [2], [3])).isfinite()


@pytest.mark.parametrize("hashing", [RAW, None])
@pytest.mark.parametrize(
    ("collection", "says"), [("ec", f"'history' is also {POOLED}"), ("ebc", f"'goods' is also {SEQUENCE}")]
)
def test_shards_do_not_share_a_weight(collection: str, says: str, hashing: recfx.HashConfig | None) -> None:
    nothing: Any = None
    with refused("tied_tables", collection, match=says):
        shard_collection(tied(hashing=hashing).get_submodule(collection), {}, nothing)


def test_shards_do_not_share_the_weight_of_another_module() -> None:
    model, nothing = built(), cast(Any, None)
    model.output = nn.Linear(DIM, ROWS, bias=False)
    model.output.weight = model.get_parameter(f"{SEQUENCE}.weight")
    del model.ebc
    model = recfx.convert(model)
    with refused("tied_tables", "ec", match="'history' is also output.weight,"):
        shard_collection(cast(Any, model.ec), {}, nothing)
