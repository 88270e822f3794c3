"""TorchRec's own ways to shard a model find converted collections, whatever sharders a script lists; or one error."""

import importlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection, set_ec_index_dedup
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan
from torchrec.distributed.types import QuantizedCommCodecs, ShardingEnv, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import recfx
from recfx.collections.sharding.collection import (
    ShardedHashEmbeddingBagCollection,
    ShardedHashEmbeddingCollection,
    sharded_collections,
)
from recfx.planner.sharder import stock_defaults
from recfx.planner.torchrec_entry import extend_torchrec, sharders_for
from tests.sharding.cases import (
    Case,
    Model,
    Table,
    as_sequence,
    batches,
    build,
    plain_model,
    plan_of,
    train_unsharded,
    with_optimizer,
)
from tests.sharding.ranks import on_ranks, ranks
from tests.support.refusals import refused

CASE = Case((Table("a", 11, 8, ("f0",)), Table("b", 13, 8, ("f1", "f0"), "MEAN")))
SEQUENCE = as_sequence(CASE)
RAW = recfx.HashConfig(dense_rows=0)
CPU = torch.device("cpu")
STOCK = {True: EmbeddingBagCollectionSharder, False: EmbeddingCollectionSharder}
"""TorchRec's sharders of pooled collections and of others."""


class Subclass(EmbeddingBagCollection):
    """A user's class: what it becomes has a class of its own."""


class SequenceSubclass(EmbeddingCollection):
    """Another."""


SUBCLASSES = {EmbeddingBagCollection: Subclass, EmbeddingCollection: SequenceSubclass}


def converted(hashing: Any = None, fused: bool = True, subclass: bool = False, case: Case = CASE) -> Any:
    model = plain_model(case)
    if subclass:
        model.sparse.__class__ = SUBCLASSES[type(model.sparse)]
    if fused:
        with_optimizer(case, model.sparse)
    return recfx.convert(model, hashing=hashing)


class Both(nn.Module):
    """A pooled and a sequence collection, each with a layer of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.pooled, self.sequence = converted(**options), converted(case=SEQUENCE, **options)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.pooled(features)[0] + self.sequence(features)[0]


HOW: dict[str, Callable[[], Any]] = {
    "left out": lambda: None,
    "the defaults, imported before recfx": stock_defaults,
    "the defaults, imported after": sharding_plan.get_default_sharders,
    "a list": lambda: [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
    "ours": recfx.sharders,
}


def weights_after_training(rank: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Every rank's batch is another one; what all ranks hold of the tables after two steps, for each way."""
    weights = {}
    for how in HOW:
        for planned in (False, True):
            weights[f"{how}, {planned}"] = _weights_after_training(rank, world_size, how, planned)
    return weights


def _weights_after_training(rank: int, world_size: int, how: str, planned: bool) -> dict[str, torch.Tensor]:
    sharders = HOW[how]()  # before there is a class for the subclasses
    model = Both(subclass=how in ("left out", "ours"))
    plan = None
    if planned:
        planner = EmbeddingShardingPlanner(topology=Topology(world_size, "cpu"))
        plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    parallel = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    assert isinstance(parallel.module.pooled.sparse, ShardedHashEmbeddingBagCollection)
    assert isinstance(parallel.module.sequence.sparse, ShardedHashEmbeddingCollection)
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    optimizer = CombinedOptimizer(
        [parallel.fused_optimizer, KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=2.0))]
    )
    for step in batches(CASE, world_size, 2):
        optimizer.zero_grad()
        parallel(step[rank]).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in recfx.unconvert(parallel.module).state_dict().items()}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.sparse.state_dict().items()}


def test_the_script_shards_what_was_converted() -> None:
    first, second = ranks(2).run(weights_after_training)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    expected = {}
    for path, case in (("pooled", CASE), ("sequence", SEQUENCE)):
        for name, value in train_unsharded(case, 2, 2)["weights"].items():
            tables = "embedding_bags" if case.is_pooled else "embeddings"
            expected[f"{path}.sparse.{tables}.{name}.weight"] = value
    for trained in first.values():
        of_tables = {name: value for name, value in trained.items() if ".sparse." in name}
        torch.testing.assert_close(of_tables, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [CASE, SEQUENCE], ids=["pooled", "sequence"])
@on_ranks(2)
def test_every_other_way_keeps_the_indexes(rank: int, world_size: int, case: Case) -> None:
    kind = "ShardedHashEmbeddingBagCollection" if case.is_pooled else "ShardedHashEmbeddingCollection"
    env, sharder = ShardingEnv.from_process_group(dist.group.WORLD), STOCK[case.is_pooled]
    _shard_modules = importlib.import_module("torchrec.distributed.shard")._shard_modules
    model = converted(RAW, case=case)
    plan = construct_module_sharding_plan(model.sparse, dict.fromkeys("ab", column_wise(ranks=[0, 1])))
    whole = ShardingPlan({"sparse": plan})
    shards = [
        sharder().shard(model.sparse, plan, env, CPU),
        _shard_modules(converted(RAW, case=case), env, CPU, whole).sparse,
        _shard_modules(converted(RAW, case=case), env, CPU, whole, sharders=[sharder()]).sparse,
        DistributedModelParallel(converted(RAW, case=case).sparse, device=CPU).module,
    ]
    assert [type(shard).__name__ for shard in shards if all(table.has_index for table in shard.tables)] == [kind] * 4


@pytest.mark.parametrize("case", [CASE, SEQUENCE], ids=["pooled", "sequence"])
@on_ranks(2)
def test_what_would_train_apart_is_refused(rank: int, world_size: int, case: Case) -> None:
    """Lists and plans leave a converted collection out."""
    model, raw = converted(case=case), converted(RAW, fused=False, case=case)
    stock = [STOCK[not case.is_pooled]()]
    plan = EmbeddingShardingPlanner(topology=Topology(world_size, "cpu")).collective_plan(model)
    for model_of_case, keywords in (
        (model, {"sharders": stock}),
        (model, {"plan": ShardingPlan({})}),
        (model, {"plan": plan, "sharders": stock}),
        (raw, {"sharders": stock}),
        (converted(fused=False, case=case), {"plan": plan, "sharders": stock}),
    ):
        before = {name: type(module) for name, module in model_of_case.named_modules()}
        with refused("collection_left_out", "sparse", match=r"sharders=recfx\.sharders\(\)"):
            DistributedModelParallel(model_of_case, device=CPU, **keywords)
        assert {name: type(module) for name, module in model_of_case.named_modules()} == before


def left_to_ddp(rank: int, world_size: int, case: Case) -> dict[str, torch.Tensor]:
    """Ordinary gradients are averaged, and one rank has nothing to diverge from: nothing to refuse."""
    model = converted(fused=world_size == 1, case=case)
    parallel = DistributedModelParallel(model, device=CPU, sharders=[STOCK[not case.is_pooled]()])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
    assert not sharded_collections(parallel)
    if world_size == 1:
        return {}
    for step in batches(CASE, world_size, 2):
        optimizer.zero_grad()
        parallel(step[rank])[0].backward()
        optimizer.step()
    return _whole(parallel.module)


@pytest.mark.parametrize("case", [CASE, SEQUENCE], ids=["pooled", "sequence"])
def test_ordinary_gradients_of_an_unsharded_collection_are_averaged(case: Case) -> None:
    first, second = ranks(2).run(left_to_ddp, case)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert ranks(1).run(left_to_ddp, case) == [{}]


@on_ranks(2)
def test_a_fused_optimizer_inside_ddp_is_refused_in_training(rank: int, world_size: int) -> None:
    model, batch = converted(), batches(CASE, world_size, 1)[0][rank]
    before = _whole(model)
    for name, parameter in model.named_parameters():
        if name.startswith("sparse"):
            del parameter._in_backward_optimizers  # or DDP would step it by itself
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(recfx.ConversionError) as caught:
        wrapped(batch)
    wrapped.eval()(batch)
    with torch.no_grad():
        wrapped.train()(batch)
    assert all(torch.equal(value, before[name]) for name, value in _whole(model).items())
    model(batch)[0].backward()  # models of their own, one on each rank
    assert (caught.value.reason, caught.value.module_path) == ("unsharded_fused_optimizer", "sparse")


@on_ranks(2)
def test_a_collection_behind_feature_processors(rank: int, world_size: int) -> None:
    batch = KeyedJaggedTensor(["f0"], torch.arange(3), lengths=torch.tensor([1, 2]))
    for trained in (False, True):
        standard, _ = build(Case((Table("a", 11, 8, ("f0",)),), is_weighted=True))
        processors = PositionWeightedModuleCollection(max_feature_lengths={"f0": 9}).requires_grad_(trained)
        model = nn.ModuleDict({"fp": FeatureProcessedEmbeddingBagCollection(standard, processors)})
        model = recfx.convert(model)
        model["over"] = nn.Linear(1, 1)
        parallel = DistributedModelParallel(model, device=CPU).module["fp"]
        assert isinstance(parallel._embedding_bag_collection, ShardedHashEmbeddingBagCollection)
        with refused("weights_require_grad", error=recfx.InputError) if trained else nullcontext():
            parallel(batch).wait()


def test_torchrecs_sharded_class_does_not_take_a_converted_collection() -> None:
    model, env = Both(), ShardingEnv.from_local(1, 0)
    with refused("wrong_sharded_class", match="EmbeddingBagCollectionSharder"):
        ShardedEmbeddingBagCollection(model.pooled.sparse, {}, env)
    with refused("wrong_sharded_class", match="EmbeddingCollectionSharder"):
        ShardedEmbeddingCollection(model.sequence.sparse, {}, env)


def in_precision(kind: CommType) -> QuantizedCommCodecs:
    return get_qcomm_codecs(QCommsConfig(backward_precision=kind))


@pytest.mark.parametrize(
    ("codecs", "named"),
    [
        ({"SEQUENCE_EMBEDDINGS_ALL_TO_ALL": in_precision(CommType.FP8)}, "fp8"),
        ({"POOLED_EMBEDDINGS_REDUCE_SCATTER": QuantizedCommCodecs()}, "NoOpQuantizedCommCodec"),
        ({"POOLED_EMBEDDINGS_ALL_TO_ALL": object()}, "object"),
        ({"pooled_embeddings_all_to_all": in_precision(CommType.FP16)}, "pooled_embeddings_all_to_all"),
    ],
)
def test_other_codecs_are_refused(codecs: Any, named: str) -> None:
    for kind in STOCK.values():
        with refused("quantized_communication", match=named):
            sharders_for(Both(), [kind(qcomm_codecs_registry=codecs)])
    with refused("quantized_communication", match=named):
        recfx.sharders(qcomm_codecs_registry=codecs)


@pytest.mark.parametrize(
    "kind", [FeatureProcessedEmbeddingBagCollectionSharder, ManagedCollisionEmbeddingBagCollectionSharder]
)
def test_codecs_of_what_was_around_a_collection_are_not_lost(kind: Any) -> None:
    codecs: Any = {"POOLED_EMBEDDINGS_ALL_TO_ALL": in_precision(CommType.BF16)}
    around = [kind(ebc_sharder=EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs))]
    for listed in ([*around, EmbeddingBagCollectionSharder()], [*recfx.sharders(), *around]):
        with refused("quantized_communication", match=kind.__name__):
            sharders_for(Both(), listed)
    for listed in ([*around, *(kind(qcomm_codecs_registry=codecs) for kind in STOCK.values())], recfx.sharders()):
        sharders_for(Both(), listed)


def test_every_sharder_passes_the_codecs_on() -> None:
    """TorchRec's planner prices what a sharder's codecs send."""
    codecs: Any = {"POOLED_EMBEDDINGS_ALL_TO_ALL": in_precision(CommType.BF16)}
    model = Both()
    listed = [kind(qcomm_codecs_registry=codecs) for kind in STOCK.values()]
    for sharders in (recfx.sharders(qcomm_codecs_registry=codecs), sharders_for(model, listed)):
        by_class = {sharder.module_type: sharder for sharder in sharders}
        for module_type in (type(model.pooled.sparse), type(model.sequence.sparse), EmbeddingCollection):
            assert by_class[module_type].qcomm_codecs_registry == codecs


@on_ranks(1)
def test_index_dedup_is_followed(rank: int, world_size: int) -> None:
    """Which tables send each different id once."""

    def tables(sharder: EmbeddingCollectionSharder, dedup: Any) -> tuple[str, ...]:
        case = as_sequence(CASE)
        converted: Any = recfx.convert(build(case)[0], dedup=dedup)
        (own,) = (one for one in sharders_for(converted, [sharder]) if one.module_type is type(converted))
        plan: Any = plan_of(case, converted, 1)
        sharded: Any = own.shard(converted, plan, ShardingEnv.from_process_group(dist.group.WORLD))
        nodes = [node for node in sharded.graph_module.graph.nodes if node.name == "ebc_dedup_ids"]
        assert len(nodes) == any(table.sends_different for table in sharded.tables)
        return tuple(table.name for table in sharded.tables if table.sends_different)

    every, asked = tuple(table.name for table in CASE.tables), EmbeddingCollectionSharder(use_index_dedup=True)
    assert (tables(asked, "auto"), tables(asked, {every[0]: False})) == (every, every[1:])
    assert tables(EmbeddingCollectionSharder(), "auto") == ()
    for flag, expected in ((True, every), (False, ())):
        with pytest.warns(DeprecationWarning, match="use_index_dedup"):
            set_ec_index_dedup(flag)
        assert tables(EmbeddingCollectionSharder(), "auto") == expected
        assert tables(EmbeddingCollectionSharder(), False) == ()


def test_other_models_and_second_calls_change_nothing() -> None:
    listed = [EmbeddingBagCollectionSharder()]
    standard, width = build(CASE)
    assert sharders_for(Model(standard, width), listed) is listed
    init, plan = DistributedModelParallel.__init__, EmbeddingShardingPlanner.plan
    extend_torchrec()
    assert DistributedModelParallel.__init__ is init
    assert EmbeddingShardingPlanner.plan is plan
    assert len(sharders_for(converted(), sharders_for(converted(), listed))) == 2


@on_ranks(1)
def test_functions_that_others_have_wrapped_before(rank: int, world_size: int) -> None:
    """Another library's wrapper, which names no argument, and was there before recfx was imported."""
    seen: list[tuple[int, set[str]]] = []
    init = inspect.unwrap(DistributedModelParallel.__init__)

    def wrapped(*a: Any, **k: Any) -> None:
        seen.append((len(a), set(k)))
        init(*a, **k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedModelParallel, "__init__", wrapped)
        extend_torchrec()
        for parallel in (
            DistributedModelParallel(converted(), device=CPU),
            DistributedModelParallel(module=converted(), device=CPU),
            DistributedModelParallel(converted(), None, CPU, None, stock_defaults()),
        ):
            assert sharded_collections(parallel)
        standard, width = build(CASE)
        assert not sharded_collections(DistributedModelParallel(Model(standard, width), device=CPU))
    named = {"device", "sharders"}
    assert seen == [(2, named), (1, {"module"} | named), (6, set()), (2, {"device"})]
