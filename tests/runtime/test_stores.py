"""Where tables are kept: the store of a collection, its new rows, and what is sent to them."""

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.dist_data import _get_recat
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.errors import InputError
from recfx.hashing import HashIndex
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.sgd import SGD
from recfx.runtime import input_dist
from recfx.runtime.input_dist import in_order_of_features
from recfx.runtime.table_store import TableStore
from recfx.versions import differences
from tests.builders.batches import bags, batch, one_bag
from tests.builders.optimizers import attach
from tests.sharding.ranks import ranks
from tests.support.refusals import refused


def store(device: str | None = None, tables: tuple[str, ...] = ("t", "u")) -> TableStore:
    bags = nn.ModuleDict({name: nn.EmbeddingBag(4, 2) for name in tables})
    indexes = nn.ModuleDict({"t": HashIndex(4)})
    optimizers = {name: FusedOptimizer(SGD, {"lr": 0.1}) for name in tables[:1]}
    return TableStore(bags, indexes, optimizers, {}, None if device is None else torch.device(device))


def test_the_device_is_that_of_the_tables_if_there_are_any() -> None:
    one = store("cpu")
    one.bags.to("meta")
    assert one.device.type == "meta"
    assert [store(device, ()).device.type for device in (None, "cpu", "meta")] == ["cpu", "cpu", "meta"]
    one.bags["t"]._parameters["weight"] = None
    assert one.device.type == "cpu"
    with refused("unsupported_bag", match="'t' has no parameter `weight`"):
        one.weight("t")


@pytest.mark.parametrize("by_torch", [True, False])
def test_whatever_a_table_becomes_is_seen(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_torch:
        monkeypatch.setattr(differences, "_TensorGuards", None)
    one = store()
    before, weight = one.look(), one.weight("u")
    data = weight.data
    for other in (data[:3], data[:, :1], data.half(), torch._neg_view(data), torch.zeros(2, 4).t()):
        weight.data = other
        assert one.look() != before
        weight.data = data
        assert one.look() == before
        with torch.inference_mode():
            assert one.look() == before
    weight.register_hook(lambda gradient: gradient)
    assert one.look() != before


def test_who_owns_a_weight_is_known_once_it_was_recorded() -> None:
    one = store()
    parameter = nn.Parameter(torch.zeros(4, 2))
    assert one.owner("t") is None
    assert one.replaced(["t", "u"], [parameter, parameter]) == []
    one.own_weights()
    assert one.replaced(["u", "t"], [parameter, one.weight("t")]) == []
    assert one.replaced(["u", "t"], [parameter, parameter]) == ["t"], "u has no fused optimizer"
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert copied.owner("t") is None


def test_threads_of_a_process_share_a_lock_and_other_processes_and_copies_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = store()
    lock = one.new_rows_lock
    assert one.new_rows_lock is lock
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert copied.new_rows_lock is not lock
        assert copied.new_rows_lock is copied.new_rows_lock
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    theirs = one.new_rows_lock
    assert theirs is not lock
    assert one.new_rows_lock is theirs


def test_a_table_without_an_index_is_told_from_one_that_is_unknown() -> None:
    one = store()
    assert isinstance(one.index("t"), HashIndex)
    with pytest.raises(KeyError, match="'u' has no index: its ids are rows"):
        one.index("u")
    with pytest.raises(KeyError, match="no table 'v' here, but t, u"):
        one.index("v")


EVICT = recfx.HashConfig(dense_rows=0, on_full="evict", buckets=1)


def model_of(
    *names: str, rows: int = 4, init_fn: Callable[[torch.Tensor], object] | None = None, **more: Any
) -> recfx.HashEmbeddingBagCollection:
    configs = [
        recfx.HashEmbeddingBagConfig(
            name=name, feature_names=[f"f{name}"], embedding_dim=4, num_embeddings=rows, init_fn=init_fn, hashing=EVICT,
            **more,
        )
        for name in names
    ]  # fmt: skip
    model = recfx.HashEmbeddingBagCollection(configs)
    attach(model, "sgd")
    return model


def step(model: recfx.HashEmbeddingBagCollection, *ids: list[int]) -> None:
    names = [f"f{table.name}" for table in model.tables]
    model(bags({name: [table_ids] for name, table_ids in zip(names, ids, strict=True)})).values().sum().backward()


class Filling:
    """An ``init_fn`` that writes how often it was called, or fails."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.fails = False

    def __call__(self, weight: torch.Tensor) -> None:
        if self.fails:
            raise ValueError("out of numbers")
        self.shapes.append(tuple(weight.shape))
        weight.data.fill_(len(self.shapes))


@pytest.mark.parametrize("kind", [DataType.FP32, DataType.FP16])
def test_only_rows_that_were_used_before_are_filled_again(kind: DataType) -> None:
    """In their own type and place, whatever the defaults are."""
    fill = Filling()
    model = model_of("t", init_fn=fill, data_type=kind)
    for group in model.fused_optimizers().values():
        group.group["lr"] = 0.0
    first, second = one_bag(1, 2, 3, feature="ft"), one_bag(1, 5, 6, feature="ft")
    with torch.device("meta"):
        model(first).values().sum().backward()
        assert fill.shapes == [(4, 4)]
        model(second).values().sum().backward()  # takes a row that was never used, and one of 2 and 3
    assert fill.shapes == [(4, 4), (1, 4)]
    rows = model.index("t").find(torch.tensor([1, 5, 6]))
    assert sorted(model.weight("t")[rows, 0].tolist()) == [1.0, 1.0, 2.0]
    assert model.weight("t").dtype == {DataType.FP32: torch.float32, DataType.FP16: torch.float16}[kind]


def test_a_single_new_row_is_initialised_and_others_are_left_alone() -> None:
    model = model_of("t", "u", rows=6)
    step(model, [1, 2], [7])
    for name in "tu":
        model.weight(name).data.fill_(9.0)
    step(model, [1, 3], [7])
    row = int(model.index("t").find(torch.tensor([3])))
    is_new = (model.weight("t").detach().abs() <= 1).all(dim=1)
    assert is_new.tolist() == [number == row for number in range(6)]
    assert bool((model.weight("u") > 8).all())
    assert not model.index("t").has_uninitialized_rows
    assert not model.index("u").has_uninitialized_rows


def test_marks_are_removed_for_every_table_of_a_batch() -> None:
    model = model_of("t", "u", "v", rows=8)
    for ids in (([1], [2, 3], [4, 5, 6]), ([7, 8], [], [9]), ([], [10], [11])):
        step(model, *ids)
        assert [model.index(name).has_uninitialized_rows for name in "tuv"] == [False] * 3
        for name in "tuv":
            model.weight(name).data.fill_(9.0)
        step(model, *ids)
        assert all(bool((model.weight(name) > 8).all()) for name in "tuv"), "nothing is initialised again"


def test_the_error_of_an_init_fn_names_the_collection() -> None:
    fill = Filling()
    model = torch.nn.ModuleDict({"ebc": model_of("t", init_fn=fill)})
    model = recfx.convert(model)  # gives the collection its path
    step(model["ebc"], [1, 2, 3, 4])  # type: ignore[arg-type]
    fill.fails = True
    with pytest.raises(InputError, match=r"table 't' cannot fill 2 rows.*ValueError: out of numbers") as caught:
        step(model["ebc"], [1, 5, 6])  # type: ignore[arg-type]
    assert caught.value.reason == "init_fn_failed"
    assert "any number of rows" in caught.value.what_to_do
    assert isinstance(caught.value.__cause__, ValueError)


KEYS = ["f0", "f1", "f2"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strides", [[2, 2], [4, 1, 3], [0, 2], [0, 0], [5]], ids=str)
@pytest.mark.parametrize("keys", [[], ["f0"], KEYS], ids=len)
def test_equals_torchrec(keys: list[str], strides: list[int], weighted: bool) -> None:
    draw = torch.Generator().manual_seed(len(keys))
    lengths = torch.randint(0, 4, (len(keys) * sum(strides),), generator=draw)
    values = torch.randperm(int(lengths.sum()), generator=draw)
    weights = torch.rand(values.numel(), generator=draw) if weighted else None
    ordered = in_order_of_features(keys, lengths, values, weights, strides)
    expected = KeyedJaggedTensor.dist_init(
        keys=keys,
        tensors=[lengths, values, *([] if weights is None else [weights])],
        variable_stride_per_key=False,
        num_workers=len(strides),
        recat=_get_recat(len(keys), len(strides), batch_size_per_rank=strides),
        stride_per_rank=strides,
    )
    assert (ordered.keys(), ordered.stride()) == (expected.keys(), expected.stride())
    for name in ("values", "lengths", "weights_or_none"):
        torch.testing.assert_close(getattr(ordered, name)(), getattr(expected, name)(), rtol=0, atol=0)
    assert ordered.offsets().tolist() == [0, *expected.lengths().cumsum(0).tolist()]


def exchanged(rank: int, world_size: int, weighted: bool, fbgemm_permutes_on: tuple[str, ...]) -> tuple[Any, Any]:
    """The ids that rank 0 receives of one feature and rank 1 of two."""
    assert dist.group.WORLD is not None
    torch.manual_seed(rank)
    exchange = input_dist.Exchange(dist.group.WORLD, ["ebc"])
    call = input_dist.Call(batch(2 + rank, KEYS, weighted=weighted), [1, 2], 0, input_dist.DistContext())
    with mock.patch.object(input_dist, "FBGEMM_PERMUTES_ON", fbgemm_permutes_on):
        started = exchange.add(call)
        exchange.start()
        ids = started.wait().wait()
    tensors = ids.values(), ids.lengths(), ids.weights_or_none()
    return (ids.keys(), ids.stride()), tensors


@pytest.mark.parametrize("weighted", [False, True])
def test_devices_with_fbgemm_and_others_receive_the_same_ids(weighted: bool) -> None:
    received, expected = (ranks(2).run(exchanged, weighted, devices) for devices in ((), ("cpu",)))
    for ours, of_torchrec in zip(received, expected, strict=True):
        assert ours[0] == of_torchrec[0]
        torch.testing.assert_close(ours[1], of_torchrec[1], rtol=0, atol=0)
