"""Rows that are given to new ids: no id ever has another id's weights or optimizer state."""

import copy
import threading
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.errors import CheckpointError, InputError
from recfx.kernels.index.index_buffers import is_uninitialized
from recfx.kernels.step.row_initialization import initial_rows, initialization_key
from tests.builders.optimizers import attach

LR, EPS, DIM, ROWS, FILL = 0.1, 1e-2, 3, 12, 0.25
PLAIN = {"first": recfx.HashConfig(dense_rows=0), "second": recfx.HashConfig(dense_rows=0, seed=5)}
OLD, GONE = [101, -7, 2**40, 5, 6, 7], [101, -7, 2**40, 5]
BATCH, LATER = [201, 5, 203, 204, 205, 6], [301, 302, 5, 201, 303]


def fill(weight: torch.Tensor) -> None:
    weight.data.fill_(FILL)


class Trained:
    """A collection in which every id of a batch gets a gradient of ones; Adagrad in backward."""

    def __init__(
        self,
        hashing: dict[str, recfx.HashConfig],
        init_fns: dict[str, Callable[[torch.Tensor], object]] | None = None,
        backend: str = "auto",
    ) -> None:
        self.hashing, self.init_fns = hashing, init_fns or {}
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=ROWS,
                embedding_dim=DIM,
                feature_names=[name],
                init_fn=self.init_fns.get(name),  # type: ignore[arg-type]
            )
            for name in hashing
        ]
        torch.manual_seed(0)
        standard = EmbeddingBagCollection(tables)
        attach(standard, torch.optim.Adagrad, lr=LR, eps=EPS)
        converted = recfx.convert(standard, hashing=hashing, backend=backend)
        self.collection = cast(HashEmbeddingBagCollection, converted)

    def batch(self, ids: list[int]) -> KeyedJaggedTensor:
        names = [table.name for table in self.collection.tables]
        lengths = torch.tensor([2, len(ids) - 2] * len(names))
        return KeyedJaggedTensor(names, torch.tensor(ids * len(names)), lengths=lengths)

    def step(self, ids: list[int]) -> None:
        self.collection.train()
        self.collection(self.batch(ids)).values().sum().backward()

    def evaluate(self, ids: list[int]) -> None:
        with torch.no_grad():
            self.collection.eval()(self.batch(ids))

    def marked(self) -> int:
        """Rows that wait for their weights."""
        states = [self.collection.index(name).row_state for name in self.collection.hash_indexes]
        return sum(int(is_uninitialized(state).sum()) for state in states)

    def expected(self, table: str, ids: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """The weights of ids that have been trained so often."""
        spec = next(spec_of_table for spec_of_table in self.collection.tables if spec_of_table.name == table)
        assert spec.hashing is not None
        key = initialization_key(table, spec.hashing.seed)
        rows = initial_rows(ids, DIM, key, spec.weight_init_min, spec.weight_init_max)
        rows = torch.full_like(rows, FILL) if table in self.init_fns else rows
        for step in range(1, int(steps.sum()) + 1):
            rows = torch.where((steps >= step).unsqueeze(1), rows - LR / (step**0.5 + EPS), rows)
        return rows

    def check(self, batches: list[list[int]]) -> None:
        """Every id has weights and state of an id that was in some of these batches, and began as new ids do."""
        for table in self.collection.tables:
            index = self.collection.index(table.name)
            ids, rows = index.items()
            assert index.find(ids).tolist() == rows.tolist()
            optimizer = self.collection.fused_optimizers()[table.name]
            total = optimizer.state["sum"][rows]
            steps = total[:, 0].round().long()
            torch.testing.assert_close(total, steps.float().unsqueeze(1).expand_as(total))
            for id_, count in zip(ids.tolist(), steps.tolist(), strict=True):
                assert count <= sum(id_ in batch for batch in batches), (table.name, id_)
            weights = self.collection.weight(table.name).detach()[rows]
            torch.testing.assert_close(weights, self.expected(table.name, ids, steps), rtol=1e-5, atol=1e-6)


def prepared(trained: Trained) -> Trained:
    """The next new ids get rows that other ids have trained."""
    trained.step(OLD)
    trained.step(OLD)
    for name in trained.collection.hash_indexes:
        trained.collection.index(name).erase(torch.tensor(GONE))
    return trained


def test_ids_that_users_insert_themselves_are_initialised() -> None:
    trained = prepared(Trained(PLAIN))
    trained.collection.index("first").find_or_insert(torch.tensor(BATCH))
    assert trained.marked() == 0
    trained.check([OLD, OLD])


def test_weights_that_users_write_for_ids_they_inserted_stay() -> None:
    trained = prepared(Trained(PLAIN))
    ids, pretrained = torch.tensor(BATCH), torch.arange(len(BATCH) * DIM, dtype=torch.float32).view(-1, DIM)
    rows = trained.collection.index("first").find_or_insert(ids)
    with torch.no_grad():
        trained.collection.weight("first")[rows] = pretrained
    trained.evaluate(BATCH)
    assert torch.equal(trained.collection.weight("first")[rows], pretrained)


def test_rows_that_init_fn_cannot_fill_are_filled_before_they_are_read() -> None:
    fails = [False]

    def sometimes(weight: torch.Tensor) -> None:
        if fails[0]:
            raise MemoryError("none left")
        fill(weight)

    trained = prepared(Trained(PLAIN, {"first": sometimes, "second": fill}))
    fails[0] = True
    with pytest.raises(InputError, match=r"\[init_fn_failed\] .*'first' cannot fill 5 rows .*none left") as caught:
        trained.step(BATCH)
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(InputError, match="init_fn_failed"):
        trained.evaluate(BATCH)
    fails[0] = False
    trained.step(BATCH)
    assert trained.marked() == 0
    trained.check([OLD, OLD, BATCH])


@pytest.mark.parametrize("again", ["reset_parameters", "to_empty"])
def test_a_collection_that_was_half_loaded_can_begin_anew(again: str) -> None:
    trained = prepared(Trained(PLAIN))
    trained.collection.index("first").expect_load()
    with pytest.raises(CheckpointError, match=r"\[load_interrupted\] first: .*load the state again"):
        trained.collection.state_dict()
    trained.collection.to_empty(device="cpu") if again == "to_empty" else trained.collection.reset_parameters()
    assert len(trained.collection.index("first")) == 0
    trained.collection.state_dict()


def test_threads_do_not_initialise_each_others_rows() -> None:
    trained = prepared(Trained(PLAIN))
    trained.collection.train()
    output = trained.collection(trained.batch(BATCH)).values().sum()
    stop, errors = threading.Event(), []

    def evaluate() -> None:
        reader = copy.copy(trained.collection.index("first"))
        while not stop.is_set():
            try:
                trained.collection.index("first").items()
                reader.find(torch.tensor(OLD))
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=evaluate)
    thread.start()
    output.backward()
    for first in range(0, 40, 4):
        for name in PLAIN:
            trained.collection.index(name).erase(trained.collection.index(name).items()[0])
        trained.step(list(range(1000 + first, 1004 + first)))
        steps = trained.collection.fused_optimizers()["first"].state["sum"][
            trained.collection.index("first").items()[1]
        ]
        assert torch.equal(steps, torch.ones_like(steps)), "a row was initialised after it was trained"
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not errors
