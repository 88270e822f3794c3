"""Whatever ``convert`` refuses, ``explain`` refuses, and the other way round, on every model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.errors import Severity
from recfx.versions.differences import make_topology
from tests.builders.batches import batch
from tests.builders.collections import collection, sharded_sequences
from tests.builders.optimizers import attach
from tests.models import REFUSED
from tests.models.handwritten import Tower, process_group
from tests.models.refused import Holder

RAW = recfx.HashConfig(dense_rows=0)


def refusal_of_convert(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    """Reason code and path of what is refused; None if nothing is."""
    try:
        recfx.convert(model, *args, **kwargs)
    except recfx.ConversionError as error:
        return error.reason, error.module_path
    return None


def errors_of_explain(model: nn.Module, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    """The refusals of the report, which says that it is not ok if there are any."""
    try:
        report = recfx.explain(model, *args, **kwargs)
    except recfx.ConversionError as error:
        return [(error.reason, error.module_path)]
    errors = [reason for reason in report.reasons if reason.severity == Severity.ERROR]
    assert report.ok == (not errors)
    return [(error.code, error.path) for error in errors]


def assert_alike(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    """Both refuse the same, or both refuse nothing; ``explain`` is asked first, and must not have changed anything."""
    errors, refusal = errors_of_explain(model, *args, **kwargs), refusal_of_convert(model, *args, **kwargs)
    assert (refusal in errors) if refusal is not None else (errors == []), (errors, refusal)
    return refusal


REQUESTS: dict[str, dict[str, Any]] = {
    "default": {},
    "raw ids": {"hashing": RAW},
    "static": {"hashing": None},
    "more rows": {"hashing": recfx.HashConfig(rows=5000)},
    "keep": {"on_unsupported": "keep", "hashing": RAW},
    "reference": {"backend": "reference"},
    "triton": {"backend": "triton"},
    "no backend": {"backend": "nonsense"},
    "no table": {"hashing": {"nonsense": RAW}},
    "no feature": {"id_ranges": {"nonsense": (0, 1)}},
    "no device": {"device": "cuda:99"},
    "other device": {"device": "meta"},
}
each_request = pytest.mark.parametrize("request_of", REQUESTS.values(), ids=list(REQUESTS))


@each_request
def test_one_model(request_of: dict[str, Any]) -> None:
    assert_alike(Holder(collection()), **request_of)


@each_request
def test_every_model_that_is_refused(request_of: dict[str, Any]) -> None:
    for case in REFUSED:
        with case.around():
            assert_alike(case.build(), **request_of)


class BesideSequences(nn.Module):
    """A collection that is converted beside one that is not, both with the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.sequences = collection(), sharded_sequences()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(features).values()


class Failing(Holder):
    """Its forward raises, so a sample says nothing of it."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        raise RuntimeError("not yet")


class Fickle(Holder):
    """Its forward looks at the class of its collection, so the conversion is not what the model was."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        values = self.arch.sparse(features).values()
        return values * 2 if isinstance(self.arch.sparse, recfx.HashEmbeddingBagCollection) else values


@pytest.mark.parametrize(
    ("model", "reason"), [(Failing, "sample_failed"), (Fickle, "verification_failed")], ids=["fails", "differs"]
)
def test_what_the_sample_shows(model: type[Holder], reason: str) -> None:
    assert assert_alike(model(collection()), (batch(4),)) == (reason, "")
    assert assert_alike(model(collection()), (batch(4),), verify=False) is None
    assert assert_alike(model(collection())) is None


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"hashing": RAW}, ("already_converted", "arch.sparse")),
        ({"backend": "reference"}, ("already_converted", "arch.sparse")),
        ({"id_ranges": {"f1": (0, 9)}}, ("already_converted", "arch.sparse")),
        ({"id_ranges": {"nonsense": (0, 9)}}, ("unknown_feature", "")),
        ({"hashing": {"nonsense": recfx.HashConfig()}}, ("unknown_table", "")),
        ({"dedup": {"nonsense": True}}, ("unknown_table", "")),
        ({"hashing": 3}, ("invalid_argument", "")),
    ],
    ids=str,
)
def test_a_model_that_is_converted_otherwise(changed: dict[str, Any], refusal: tuple[str, str]) -> None:
    converted = recfx.convert(Holder(collection()))
    assert assert_alike(converted, **changed) == refusal
    assert assert_alike(converted) is None


@pytest.mark.parametrize("make", [Tower, lambda: recfx.convert(Tower())], ids=["standard", "converted"])
def test_layers_on_meta_cannot_move(make: Callable[[], Any]) -> None:
    model = make().to("meta")
    assert assert_alike(model, device="meta") is None
    assert assert_alike(model, device="cpu") == ("model_on_meta", "linear")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.linear.to_empty(device="cpu")
    assert assert_alike(model, device="cpu") is None


def on_one_rank(plan: ParameterSharding | None = None, *names: str) -> ShardingPlan:
    """A plan for the collection at ``arch.sparse``, or at the names that are given."""
    tables = {name: plan or ParameterSharding("table_wise", "fused", [0], _shards(20)) for name in ("t1", "t2")}
    return ShardingPlan({name: dict(tables) for name in names or ("arch.sparse",)})


def _shards(rows: int, rank: int = 0) -> EnumerableShardingSpec:
    return EnumerableShardingSpec([ShardMetadata([0, 0], [rows, 8], f"rank:{rank}/cpu")])


DIAGONAL = ParameterSharding("diagonal", "fused", [0])
PLANS = {
    "good": (on_one_rank(), None),
    "unknown collection": (on_one_rank(None, "arch.sparse", "other"), ("plan_unknown_collection", "other")),
    "missing collection": (ShardingPlan({}), ("plan_missing_collection", "arch.sparse")),
    "unknown type": (on_one_rank(DIAGONAL), ("unsupported_sharding_type", None)),
    "other shape": (
        on_one_rank(ParameterSharding("table_wise", "fused", [0], _shards(7))),
        ("plan_shape_mismatch", None),
    ),
    "rank that is not there": (
        on_one_rank(ParameterSharding("table_wise", "fused", [1], _shards(20, 1))),
        ("plan_rank", None),
    ),
}


@pytest.mark.parametrize(("plan", "refusal"), PLANS.values(), ids=list(PLANS))
def test_plans(plan: ShardingPlan, refusal: tuple[str, str | None] | None) -> None:
    with process_group():
        told = assert_alike(Holder(collection()), plan=plan)
    if refusal is None or told is None:
        assert told is refusal
    else:
        assert told[0] == refusal[0]
        assert refusal[1] in (None, told[1])


def test_nothing_is_said_of_the_plan_of_a_collection_that_is_refused() -> None:
    model = Holder(collection())
    attach(model, torch.optim.Adam)
    report = recfx.explain(model, plan=on_one_rank(), world_size=1, hashing=recfx.HashConfig(rows=5000))
    assert [reason.code for reason in report.reasons if reason.severity == "error"] == ["optimizer_holds_state"]


def test_a_plan_for_a_collection_that_is_kept() -> None:
    with process_group():
        plan = on_one_rank(None, "bags", "sequences")
        assert assert_alike(BesideSequences(), plan=plan) == ("plan_unknown_collection", "sequences")


def test_a_rank_may_ask_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec's ``ShardingEnv`` makes a ``DeviceMesh``; with some versions of torch, all ranks take part in that."""
    monkeypatch.setattr(ShardingEnv, "from_process_group", lambda group: pytest.fail("this may communicate"))
    with process_group():
        assert recfx.explain(Holder(collection()), plan=on_one_rank()).ok


def test_a_plan_for_a_table_whose_optimizer_has_no_fused_form() -> None:
    with process_group():
        model = Holder(collection())
        attach(model, torch.optim.RMSprop)
        assert assert_alike(model, plan=on_one_rank()) == ("optimizer_not_fused", "arch.sparse")
        assert assert_alike(model, plan=on_one_rank(DIAGONAL)) == ("unsupported_sharding_type", "arch.sparse")
        assert assert_alike(model) is None


def test_ranks_without_a_plan_are_planned() -> None:
    """``env`` alone, as for ``convert``; ``topology`` says the same of ranks that are not there."""
    with process_group():
        assert assert_alike(Holder(collection()), env=ShardingEnv.from_process_group(dist.group.WORLD)) is None
    wrong = {"topology": 3}, {"topology": make_topology(2, "cpu"), "world_size": 3}, {"env": 3}
    for settings in wrong:
        with pytest.raises(recfx.ConversionError, match=r"^\[invalid_argument\] "):
            recfx.explain(Holder(collection()), **settings)
    tiny = make_topology(world_size=2, compute_device="cpu", ddr_cap=1)
    assert errors_of_explain(Holder(collection()), topology=tiny) == [("plan_does_not_fit", "")]


class Untraceable(Holder):
    """Its forward cannot be traced."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.arch.sparse(features).values() * (2 if features.values().sum() > 0 else 3)


def test_a_graph_of_the_whole_model() -> None:
    for untraceable in (Untraceable(collection()), recfx.convert(Untraceable(collection()))):
        assert assert_alike(untraceable, (batch(4),), whole_graph=True) == ("untraceable_root", "")
    for model in (Holder(collection()), recfx.convert(Holder(collection())), Tower().to("meta")):
        assert assert_alike(model, (batch(4),), whole_graph=True) is None
    assert assert_alike(Holder(collection()), whole_graph=True) == ("sample_required", "")


def test_a_plan_for_a_model_that_is_sharded_already() -> None:
    with process_group():
        sharded = recfx.convert(Holder(collection()), plan=on_one_rank())
        assert assert_alike(sharded, plan=on_one_rank()) == ("already_sharded", "arch.sparse")
