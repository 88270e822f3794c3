"""One test a reason code: it appears where it should, with what it should say, and not where it should not.

Those of an index are in ``test_capacity.py``.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

from recfx import HashConfig, convert
from recfx.errors import Diagnostic
from recfx.inspect.explain import explain
from recfx.kernels.build import library
from recfx.planner.topology import npu_topology
from tests.builders.optimizers import attach
from tests.inspect.models import Wrapped, batch, collection, config
from tests.support.refusals import refused

INDEX = HashConfig(dense_rows=0)


def only(model: nn.Module, code: str) -> list[Diagnostic]:
    return [reason for reason in explain(model).reasons if reason.code == code]


def optimized(kind: type, tables: int = 1, **arguments: Any) -> nn.Module:
    model = Wrapped(collection(tables))
    attach(model, kind, **arguments)
    return convert(model)


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (torch.optim.SGD, {}, "fused sgd"),
        (torch.optim.Adagrad, {}, "fused adagrad"),
        (torch.optim.Adam, {}, "fused adam"),
        (torch.optim.RMSprop, {}, "in backward, not fused: optimizer_not_fused"),
    ],
)
def test_optimizer_text(kind: type, arguments: dict[str, Any], text: str) -> None:
    (collection,) = explain(optimized(kind, **arguments)).collections
    assert collection.tables[0].optimizer == text


def test_frozen_table() -> None:
    model = Wrapped(collection(1))
    model.requires_grad_(False)
    assert explain(model).collections[0].tables[0].optimizer == "none: frozen"


def test_optimizer_not_fused() -> None:
    (reason,) = only(optimized(torch.optim.RMSprop), "optimizer_not_fused")
    assert (reason.severity, reason.path) == ("warning", "inner.embedding_bags.t0")
    assert only(optimized(torch.optim.Adagrad), "optimizer_not_fused") == []


@pytest.mark.parametrize(
    ("tables", "change", "size"),
    [
        (15, None, None),
        (16, None, "64.0 MiB"),
        (17, lambda model: model.eval(), None),
        (17, lambda model: model.requires_grad_(False), None),
        (17, lambda model: attach(model, torch.optim.SGD), None),
    ],
)
def test_dense_gradients_are_told_from_a_size_on(tables: int, change: Callable[..., Any] | None, size: str) -> None:
    rows = 2**17  # of eight columns: 4 MiB
    model = Wrapped(EmbeddingBagCollection(tables=[config(n, rows=rows) for n in range(tables)], device="meta"))
    if change is not None:
        change(model)
    told = only(convert(model), "dense_gradients")
    assert [reason.path for reason in told] == ([] if size is None else ["inner"])
    assert all(size in reason.message for reason in told)


def test_a_table_is_shown_as_its_plan_has_it() -> None:
    model = Wrapped(collection(1))
    plan = construct_module_sharding_plan(
        model.inner, {"t0": table_wise(rank=0, compute_kernel="fused")}, local_size=2, world_size=2, device_type="cpu"
    )
    hashing = HashConfig.raw_ids(on_full="evict")
    report = explain(model, plan=ShardingPlan({"inner": plan}), topology=npu_topology(2), hashing=hashing)
    assert {reason.code for reason in report.reasons} == {"default_fused_optimizer", "weights_not_used"}
    (table,) = report.collections[0].tables
    assert (table.optimizer, table.kernel) == ("fused sgd", "npu[vendor]")


def test_optimizer_attached_after_conversion_is_taken_over() -> None:
    model = convert(Wrapped(collection(1)))
    attach(model, torch.optim.SGD)
    assert explain(model).collections[0].tables[0].optimizer == "fused sgd"
    assert explain(model).reasons == ()
    model(batch([1, 2], features=1)).sum().backward()
    assert all(weight.grad is None for weight in model.parameters())  # what the report says is so


@pytest.mark.parametrize(
    ("kind", "arguments", "differs"),
    [
        (torch.optim.Adam, {}, True),
        (torch.optim.SGD, {"weight_decay": 0.5}, True),
        (torch.optim.SGD, {}, False),
        (torch.optim.Adagrad, {}, False),
    ],
)
def test_only_touched_rows(kind: type, arguments: dict[str, Any], differs: bool) -> None:
    assert bool(only(optimized(kind, **arguments), "only_touched_rows")) is differs


def test_kernel_fallback_names_who_declined() -> None:
    model = convert(Wrapped(collection(1))).double()
    (reason,) = only(model, "kernel_fallback")
    assert "fbgemm: " in reason.message
    (table,) = explain(model).collections[0].tables
    assert table.kernel == "reference"
    assert [(one.by, one.code) for one in table.kernels_passed_over] == [("cpu", "dtype"), ("fbgemm", "dtype")]


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(convert(Wrapped(collection(1))), "no_library") == []
    monkeypatch.setattr(library, "load", lambda: False)
    monkeypatch.setattr(library, "why_not", lambda: "the compiler failed: no space")
    (reason,) = only(convert(Wrapped(collection(1))), "no_library")
    assert (reason.severity, reason.path) == ("warning", "inner.embedding_bags.t0")
    assert "the compiler failed: no space" in reason.message
    with refused("no_library"):
        convert(Wrapped(collection(1)), hashing=INDEX)


def test_reference_by_choice_is_no_fallback() -> None:
    model = convert(Wrapped(collection(1)), backend="reference")
    assert explain(model).reasons == ()
    assert explain(model).collections[0].tables[0].kernel == "reference"


def test_meta_tables_choose_their_kernel_later() -> None:
    assert explain(Wrapped(EmbeddingBagCollection(tables=[config(0)], device="meta"))).reasons == ()


def test_named_backend_that_cannot_serve_is_an_error() -> None:
    report = explain(convert(Wrapped(collection(1)), backend="fbgemm").to("meta"))
    assert [(reason.severity, reason.code) for reason in report.reasons] == [("error", "backend_unusable")]
    assert not report.ok
    assert report.collections[0].tables[0].kernel == ""


def test_weights_not_used() -> None:
    tables = [config(0), config(1, init_fn=partial(nn.init.constant_, val=2.0)), config(2)]
    model = Wrapped(EmbeddingBagCollection(tables=tables))
    converted = convert(model, hashing={"t0": INDEX, "t1": INDEX})
    reasons = [(reason.severity, reason.code, reason.path) for reason in explain(converted).reasons]
    assert reasons == [("info", "weights_not_used", "inner.embedding_bags.t0")]
    assert [table.custom_init_fn for table in explain(converted).collections[0].tables] == [False, True, False]


def test_new_rows_behind_the_old_keep_the_weights() -> None:
    report = explain(convert(Wrapped(collection(1)), hashing=HashConfig(rows=150), inplace=True))
    assert report.reasons == ()
    hashing = report.collections[0].tables[0].hashing
    assert hashing is not None
    assert (hashing.mode, hashing.rows, hashing.dense_rows, hashing.ids_held) == ("index", 150, 100, 0)


def test_data_type_not_honoured() -> None:
    model = Wrapped(EmbeddingBagCollection(tables=[config(0, data_type=DataType.FP16), config(1)]))
    assert only(model, "data_type_not_honoured") == []
    (reason,) = only(model.float(), "data_type_not_honoured")
    assert reason.path == "inner.embedding_bags.t0"


def test_settings_of_an_index_that_there_is_none_of() -> None:
    others: dict[str, Any] = {"buckets": 2, "on_full": "evict", "evict": "ttl", "admit_after": 3, "unseen": "share"}
    others |= {"seed": 7, "ttl_batches": 4}
    assert {"rows", "dense_rows", *others} == {field.name for field in fields(HashConfig)}
    for hashing in (HashConfig(seed=7), HashConfig(**others), HashConfig(dense_rows=0, evict="lfu")):
        assert len(only(convert(Wrapped(collection(1)), hashing=hashing), "index_settings_not_used")) == 1
    for hashing in (
        HashConfig(),
        HashConfig.raw_ids(on_full="share"),
        HashConfig.raw_ids(on_full="evict", evict="lfu"),
    ):
        assert only(convert(Wrapped(collection(1)), hashing=hashing), "index_settings_not_used") == []


@pytest.mark.parametrize(("hashing", "severity"), [(None, "warning"), (INDEX, "info")])
def test_virtual_table_not_followed(hashing: HashConfig | None, severity: str) -> None:
    virtual = config(0)
    virtual.use_virtual_table = True
    model = Wrapped(EmbeddingBagCollection(tables=[virtual, config(1)]))
    (reason,) = only(convert(model, hashing=hashing), "virtual_table_not_followed")
    assert (reason.severity, reason.path) == (severity, "inner.embedding_bags.t0")
