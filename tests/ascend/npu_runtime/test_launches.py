"""How many operators a step calls on an NPU, whatever the number of tables: each is launched by the host.

Counted are operators of torch and recfx that read or write a tensor on the NPU, and kernels in Triton. Views and
memory that is only allocated are free; a copy from or to the host counts as one.
"""

from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, PoolingType
from torchrec.distributed.types import LazyAwaitable

import recfx
from tests.ascend.npu_runtime.recorder import Recorder, launching_nothing
from tests.ascend.npu_runtime.round_trips import Moment
from tests.ascend.npu_runtime.sharded_training import model_on_npus
from tests.ascend.npu_runtime.training import DEVICE, RAW_IDS
from tests.builders.batches import batch
from tests.builders.collections import sequence_table, table
from tests.builders.optimizers import attach
from tests.models.case import tensors_in
from tests.sharding.cases import Case, Table, batches
from tests.sharding.ranks import ranks

RAW = recfx.HashConfig(dense_rows=0)
HASHING = {"static": None, "hashed": RAW, "known": RAW}
# So many in training and in eval mode, and waits of the host in either: of tables that are summed, whose keys are
# in order, or in another; and of others that are averaged beside them, with keys in another order, which makes two
# lookups of a collection that is not hashed; and of tables whose rows are not pooled. Of hashed ones, some ids are new,
# or all are known, whose number is there by the time that the host asks.
BOUNDS = {
    ("static", "sums"): (16, 7, 0, 0),
    ("static", "other order"): (17, 8, 0, 0),
    ("static", "means"): (29, 9, 1, 1),
    ("hashed", "sums"): (35, 18, 2, 0),
    ("known", "sums"): (19, 18, 1, 0),
    ("hashed", "means"): (43, 25, 2, 0),
    ("static", "rows"): (16, 4, 1, 1),
    ("hashed", "rows"): (38, 13, 2, 1),
}
# What the vendor's operators launch: without tables, and how many more for each table in either mode.
BOUNDS_OF_VENDOR = {
    ("static", "sums"): (13, 4, 1, 1, 2),
    ("static", "other order"): (14, 5, 1, 1, 2),
    ("static", "means"): (29, 9, 1, 1, 2),
    ("hashed", "sums"): (39, 17, 2, 1, 4),
    ("known", "sums"): (23, 17, 1, 1, 4),
    ("hashed", "means"): (47, 24, 2, 1, 4),
    ("static", "rows"): (15, 3, 1, 1, 1),
    ("hashed", "rows"): (40, 15, 2, 1, 2),
}
TWO = Case(
    (
        Table("a", 11, 8, ("f0",), "SUM", ("row_wise",)),
        Table("b", 13, 16, ("f1", "f0"), "MEAN", ("column_wise", 1, 0)),
        Table("c", 9, 8, ("f2",), "SUM", ("table_wise", 1)),
        Table("d", 7, 8, ("f1",), "MEAN", ("data_parallel",)),
    ),
    optimizer="adagrad",
)
ONE = Case(
    tuple(Table(f"t{n}", 9, 8, (f"f{n}",), "SUM", ("row_wise",)) for n in range(3)),
    optimizer="adagrad",
)
# What two ranks launch with a table of each sharding type, some of which are averaged; and for one rank.
OF_RANKS = {TWO: [(117, 77, 7, 7), (109, 77, 7, 7)], ONE: [(16, 7, 0, 0)]}
TRAINING, EVAL = (Moment("npu", "unsharded", when) for when in ("training", "eval"))


def launches(recorder: Recorder) -> tuple[int, ...]:
    return tuple(counts[when].total() for counts in (recorder.launches, recorder.waits) for when in (TRAINING, EVAL))


def step(recorder: Recorder, model: torch.nn.Module, features: KeyedJaggedTensor) -> None:
    recorder.launches.clear()
    recorder.waits.clear()
    with recorder:
        recorder.now = TRAINING
        outputs = [output for output in tensors_in(awaited(model.train()(features))) if output.is_floating_point()]
        recorder.now = None  # the gradients are those of the rest of the model
        gradients = [torch.ones_like(output) for output in outputs]
        recorder.now = TRAINING
        torch.autograd.backward(outputs, gradients)
        recorder.now = EVAL
        with torch.no_grad():
            awaited(model.eval()(features))
        recorder.now = None


def awaited(output: Any) -> Any:
    """What a sharded collection has looked up, too."""
    return output.wait() if isinstance(output, LazyAwaitable) else output


@pytest.mark.parametrize("target", ["npu", "npu[vendor]"])
@pytest.mark.parametrize("count", [3, 26])
@pytest.mark.parametrize(("kind", "pooling"), BOUNDS)
def test_steps_are_bounded(kind: str, pooling: str, count: int, target: str) -> None:
    means = [PoolingType.MEAN if pooling == "means" and number % 2 else PoolingType.SUM for number in range(count)]
    tables = [
        table(f"t{number}", [f"f{number}"], dim=4 * (number % 5 + 1), pooling=mean) for number, mean in enumerate(means)
    ]
    collection = EmbeddingBagCollection(tables)
    if pooling == "rows":
        alike = [sequence_table(f"t{number}", [f"f{number}"]) for number in range(count)]
        collection = EmbeddingCollection(alike)
    attach(collection, "adagrad")
    order = [f"f{number}" for number in range(count)][:: -1 if pooling in ("means", "other order") else 1]
    recorder, drawn = Recorder(frozenset()), batch(4, tuple(order), rows=8)
    with launching_nothing(target):
        model = recfx.convert(collection, hashing=HASHING[kind]).to(DEVICE)
        for number in range(2):  # in the second step, what does not depend on the batch is there, but for new ids
            features = drawn
            if kind != "static":
                values = features.values() * RAW_IDS[0] + RAW_IDS[1] + number * (kind == "hashed")
                features = KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())
            step(recorder, model, features.to(torch.device(DEVICE)))
    expected = BOUNDS[kind, pooling]
    if target == "npu[vendor]":
        training, evaluation, *waits, per_table = BOUNDS_OF_VENDOR[kind, pooling]
        expected = (training + count * per_table, evaluation + count * per_table, *waits)
    assert launches(recorder) == expected, (recorder.launches, recorder.waits)


def of_a_rank(rank: int, world_size: int, case: Case) -> tuple[int, ...]:
    device = torch.device("npu", rank)
    torch.npu.set_device(device)
    recorder = Recorder(frozenset())
    with launching_nothing():
        collection = model_on_npus(case, world_size, device, ids_on_host=False).sparse
        alone = [[batch(4, ("f0", "f1", "f2"))]] * 2
        for of_ranks in batches(case, world_size, 2) if world_size > 1 else alone:
            step(recorder, collection, of_ranks[rank].to(device))
    return launches(recorder)


@pytest.mark.parametrize("case", OF_RANKS)
def test_steps_of_ranks_are_bounded(case: Case) -> None:
    assert ranks(len(OF_RANKS[case]), "hccl").run(of_a_rank, case) == OF_RANKS[case]
