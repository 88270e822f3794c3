"""Managed collisions become indexes: no learned id loses its row, and training goes on."""

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    average_threshold_filter,
)
from torchrec.quant.embedding_modules import QuantManagedCollisionEmbeddingCollection

import recfx
from tests.builders.managed_collisions import DIM, FEATURES, LEARNED, ROWS, Model, batch, hash_zch, learn, managed, mch
from tests.builders.optimizers import attach
from tests.support.needs import needed
from tests.support.refusals import refused

PECEmbeddingCollection = needed("torchrec.modules.pec_embedding_modules.PECEmbeddingCollection", "TorchRec 1.7")
QuantManagedCollisionEmbeddingBagCollection = needed(
    "torchrec.quant.embedding_modules.QuantManagedCollisionEmbeddingBagCollection", "TorchRec 1.5"
)
MC = (BaseManagedCollisionEmbeddingCollection, ManagedCollisionCollection, ManagedCollisionModule)
ASKED = batch([*LEARNED, 99, 2**40], [7, 98], [3, 10**15, 77, 2])


def converted(model: nn.Module, **settings: Any) -> Any:
    return recfx.convert(model, managed_collisions="convert", **settings)


def inner(model: Any) -> Any:
    return model.mc._embedding_module


@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize("remapped", [True, False])
def test_eval_is_as_before(is_pooled: bool, remapped: bool) -> None:
    model = Model(learn(managed(is_pooled, return_remapped_features=remapped))).eval()
    state = copy.deepcopy(model.state_dict())
    expected = model(ASKED)
    ours = converted(model, sample=(ASKED,)).eval()
    assert not [module for module in ours.modules() if isinstance(module, MC)]
    for left, right in zip(expected, ours(ASKED), strict=True):
        assert torch.equal(left, right)
        assert left.dtype == right.dtype
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    for left, right in zip(expected, model(ASKED), strict=True):
        assert torch.equal(left, right)
    reasons = [*recfx.explain(ours).reasons, *recfx.explain(model, managed_collisions="convert").reasons]
    assert "weights_not_used" not in {reason.code for reason in reasons}
    notes = [reason for reason in recfx.explain(ours).reasons if reason.code == "managed_collision_converted"]
    (note,) = notes  # of both tables, because it is the same
    assert re.match(r"\d+ learned ids of tables a, b keep their rows\. Training goes on differently: ", note.message)


@pytest.mark.parametrize("is_pooled", [True, False])
def test_training_goes_on_as_with_a_dictionary(is_pooled: bool) -> None:
    """Known ids train their rows with the optimizer state that they had; unknown ones get rows, and start anew."""
    collection = managed(is_pooled)
    attach(collection._embedding_module, torch.optim.Adagrad, lr=0.1)
    before = learn(collection)
    for _ in range(2):
        sum(value.sum() for value in Model(before)(batch(LEARNED, [7], [1, 2]))).backward()
    tables = before._embedding_module
    weight = next(tables.parameters())
    remapper: Any = before._managed_collision_collection._managed_collision_modules["a"]
    row_of = dict(zip(remapper._mch_sorted_raw_ids.tolist(), remapper._mch_remapped_ids_mapping.tolist(), strict=True))
    rows = {id_: weight[row_of[id_]].detach().clone() for id_ in LEARNED}
    (optimizer,) = weight._in_backward_optimizers
    sums = {id_: optimizer.state[weight]["sum"][row_of[id_]].clone() for id_ in LEARNED}
    miss = weight[ROWS - 1].detach().clone()
    ours = converted(Model(before)).train()
    index = inner(ours).index("a")
    for step in range(3):
        ids = [*LEARNED[:3], 500, 500 + step]
        if step == 0:
            assert index.find(torch.tensor(ids)).tolist() == [*(row_of[id_] for id_ in LEARNED[:3]), -1, -1]
        outputs = ours(batch(ids, [], []))
        for id_ in set(ids) - rows.keys():
            rows[id_] = inner(ours).weight("a")[int(index.find(torch.tensor([id_])))].detach().clone()
            sums[id_] = torch.zeros(4)
        first, *rest = (torch.stack([rows[id_] for id_ in part]).sum(0) for part in (ids[:1], ids[1:]))
        expected = torch.stack([first, *rest]) if is_pooled else torch.stack([rows[id_] for id_ in ids])
        torch.testing.assert_close(outputs[0], expected)
        outputs[0].sum().backward()
        for id_ in set(ids):
            gradient = float(ids.count(id_))
            sums[id_] = sums[id_] + gradient**2
            rows[id_] = rows[id_] - 0.1 * gradient / (sums[id_].sqrt() + 1e-10)
    for id_, row in rows.items():
        torch.testing.assert_close(inner(ours).weight("a")[int(index.find(torch.tensor([id_])))], row)
    assert torch.equal(inner(ours).weight("a")[ROWS - 1], miss)
    assert torch.equal(ours.eval()(batch([12345], [], []))[0][0], miss)


def test_the_state_of_managed_collisions_is_loaded_before_the_conversion() -> None:
    model = Model(learn(managed(False)))
    state, ours = copy.deepcopy(model.state_dict()), converted(model)
    before = copy.deepcopy(ours.state_dict())
    for strict in (True, False):
        with refused("checkpoint_mismatch", error=recfx.CheckpointError):
            ours.load_state_dict(state, strict=strict)
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0, equal_nan=True)


POLICIES = {
    "lfu": (LFU_EvictionPolicy, "lfu"),
    "lru": (LRU_EvictionPolicy, "lru"),
    "decay": (lambda: LRU_EvictionPolicy(decay_exponent=2.0), "lru"),
    "distance": (DistanceLFU_EvictionPolicy, "lfu"),
    "threshold": (lambda: LFU_EvictionPolicy(average_threshold_filter), "lfu"),
}


@pytest.mark.parametrize("name", list(POLICIES))
def test_scores_are_carried_over(name: str) -> None:
    """The ids that the module would evict first lose their rows first."""
    make, rule = POLICIES[name]
    model = Model(managed(True, lambda: mch(policy=make())))
    attach(model, torch.optim.SGD, lr=0.1)
    for ids in ([*range(100, 100 + ROWS - 1)], [*range(100, 107)], [*range(105, 100 + ROWS - 1)] * 3, [100, 101]):
        model.train()(batch(ids, [], [1]))
    ours = converted(model)
    index = inner(ours).index("a")
    assert index.config.evict == rule
    assert index.counters["batches"] == 4
    if name != "threshold":  # by which nothing has been learned
        assert set(index.items()[0].tolist()) == set(range(100, 100 + ROWS - 1))
        evicted = [index.insert(torch.tensor([7000 + count] * 9)).evicted_ids.tolist() for count in range(3)]
        assert sorted(id_ for (id_,) in evicted) == [102, 103, 104]
    (note,) = [r for r in recfx.explain(ours).reasons if r.code == "managed_collision_converted"]
    assert f"evict={rule!r}" in note.message or rule == "lru"  # which is the default


def test_hash_zch_keeps_its_slots() -> None:
    model = Model(managed(False, hash_zch))
    for remap in model.mc._managed_collision_collection._managed_collision_modules.values():
        remap._hash_zch_identities.data[[2, 5, 11], 0] = torch.tensor([7, 10**12, -9])
    weight = next(model.mc._embedding_module.parameters())
    ours = converted(model).eval()
    output = ours(batch([7, 10**12, -9, 55], [], []))[0]
    assert torch.equal(output, torch.cat([weight[[2, 5, 11]], torch.zeros(1, 4)]))
    other = converted(model, hashing={"a": recfx.HashConfig(unseen="row"), "b": recfx.HashConfig(rows=20)})
    assert inner(other).weight("a").shape[0] == ROWS + 1
    assert inner(other).index("a").find(torch.tensor([7, 10**12, -9])).tolist() == [2, 5, 11]


def test_a_model_that_trains_gets_more_rows_by_the_way_that_its_refusal_names(tmp_path: Path) -> None:
    def attached(model: nn.Module) -> nn.Module:
        attach(inner(model), torch.optim.Adagrad)
        return model

    more = {"a": recfx.HashConfig(rows=30)}
    trained = attached(Model(learn(managed(False))))
    with refused("optimizer_holds_state"):
        converted(trained, hashing=more)
    ours = converted(trained)
    sum(map(torch.sum, ours(ASKED))).backward()
    recfx.save_checkpoint(ours, tmp_path)
    larger = attached(converted(Model(managed(False)), hashing=more))
    recfx.load_checkpoint(larger, tmp_path)
    assert inner(larger).weight("a").shape[0] == 30
    known = batch([10**12, 7], [-5], [3])
    for _ in range(2):
        for left, right in zip(ours(known), larger(known), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
        for model in (ours, larger):
            sum(map(torch.sum, model(known))).backward()


class OwnRemap(type(mch())):  # type: ignore[misc]
    def remap(self, features: Any, *rest: Any) -> Any:
        return super().remap(features, *rest)


class OwnPolicy(LFU_EvictionPolicy):
    pass


def own_forward() -> Any:
    collection = managed(True)
    collection.forward = lambda features: features
    return collection


def on_meta() -> Any:
    collection = learn(managed(True))
    return collection.to("meta")


def with_update() -> Any:
    collection = managed(True)
    collection._embedding_module.embedding_bag_configs()[0].enable_embedding_update = True
    return collection


def damaged(row: int) -> Any:
    """The module of table "a" has given a row that the table has not, or that another id has."""
    collection = learn(managed(True))
    remapper: Any = collection._managed_collision_collection._managed_collision_modules["a"]
    remapper._mch_remapped_ids_mapping[0] = remapper._mch_remapped_ids_mapping[1] if row == TWICE else row
    return collection


TWICE = 1000


def pruned(is_pooled: bool) -> Any:
    inner = managed(is_pooled)._embedding_module
    module = GenericITEPModule(dict.fromkeys(FEATURES, 2 * ROWS))
    return (ITEPEmbeddingBagCollection if is_pooled else ITEPEmbeddingCollection)(inner, module)


def quantized(is_pooled: bool) -> Any:
    standard = managed(is_pooled)
    remapping, inner = standard._managed_collision_collection, standard._embedding_module
    if is_pooled:
        configs = inner.embedding_bag_configs()
        return QuantManagedCollisionEmbeddingBagCollection(
            configs, False, torch.device("cpu"), managed_collision_collection=remapping
        )
    configs = inner.embedding_configs()
    return QuantManagedCollisionEmbeddingCollection(
        configs, torch.device("cpu"), managed_collision_collection=remapping
    )


REFUSED = {
    "managed_collision_code": [
        lambda: managed(True, lambda: OwnRemap(ROWS, torch.device("cpu"), LFU_EvictionPolicy(), 1)),
        lambda: managed(False, lambda: mch(policy=OwnPolicy())),
        own_forward,
        lambda: pruned(True),
        lambda: pruned(False),
        lambda: PECEmbeddingCollection(managed(False)._embedding_module),
        lambda: managed(True, hash_zch, {"a_readonly": ["f"]}),
        lambda: managed(False, lambda: hash_zch(read_only_suffix="_shown"), {"a": ["f_shown"]}),
    ],
    "quantized_collection": [lambda: quantized(True), lambda: quantized(False)],
    "managed_collision_hash": [
        lambda: managed(True, lambda: mch(input_hash_func=lambda ids, size: ids % size)),
        lambda: managed(True, lambda: hash_zch(inference_dispatch_div_train_world_size=True)),
    ],
    "managed_collision_damaged": [lambda: damaged(ROWS), lambda: damaged(-1), lambda: damaged(TWICE)],
    "managed_collision_part": [lambda: managed(True, lambda: mch(output_global_offset=ROWS))],
    "managed_collision_on_meta": [on_meta],
    "managed_collision_layout": [
        lambda: learn(managed(True, of_tables={"a": ["f", "h"], "b": ["f"]})),
        lambda: managed(False, iter([mch(), hash_zch()]).__next__, {"a": ["f"], "b": ["f"]}),
    ],
    "embedding_update": [with_update],
}


@pytest.mark.parametrize(("reason", "make"), [(reason, make) for reason, all_ in REFUSED.items() for make in all_])
def test_what_cannot_be_taken_over_is_refused_by_name(reason: str, make: Any) -> None:
    model = Model(make())
    with pytest.raises(recfx.ConversionError) as caught:
        converted(model)
    assert (caught.value.reason, caught.value.module_path) == (reason, "mc")
    kept = converted(model, on_unsupported="keep")
    assert type(kept.mc) is type(model.mc)
    report = recfx.explain(model, managed_collisions="convert")
    assert not report.ok
    assert [collection.reason for collection in report.collections if collection.reason] == [
        reason
    ]  # others are what it holds


@pytest.mark.parametrize("asked", [None, recfx.HashConfig(dense_rows=3), recfx.HashConfig(buckets=2)])
def test_hashing_that_would_take_rows_from_learned_ids(asked: Any) -> None:
    with pytest.raises(recfx.ConversionError) as caught:
        converted(Model(learn(managed(True))), hashing={"a": asked})
    assert caught.value.reason == "learned_ids_lost"
    assert "a dict by table name that leaves the table out" in caught.value.what_to_do


@pytest.mark.parametrize("is_pooled", [True, False])
def test_unconverted_models_return_the_rows_that_they_are_given(is_pooled: bool) -> None:
    ours = converted(Model(learn(managed(is_pooled, return_remapped_features=True)))).eval()
    plain, mapping = recfx.unconvert(ours, with_mapping=True)
    for left, right in zip(ours(ASKED), plain(mapping.to_rows(ASKED)), strict=True):
        assert torch.equal(left, right)


def test_returned_rows_are_those_that_training_read() -> None:
    """Ids of a full table train the row that they share, but in eval mode they read zeros."""
    shares = recfx.HashConfig(rows=ROWS, on_full="share", unseen="zeros", buckets=1)
    ours = converted(managed(False, return_remapped_features=True), hashing={"a": shares})
    torch.manual_seed(0)
    shared = 0
    for step in range(16):
        ours.train(step % 4 < 3)
        ids = torch.randint(0, 30, (6,)).tolist()
        embeddings, rows = ours(batch(ids, [], []))
        weight = torch.cat([ours.weight("a"), torch.zeros(1, DIM)])  # -1 reads zeros
        torch.testing.assert_close(embeddings["f"].values(), weight[rows["f"].values()], rtol=0, atol=0)
        shared += int((ours.index("a").find(torch.tensor(ids)) != rows["f"].values()).sum())
    assert shared
    late = dataclasses.replace(shares, admit_after=2)
    with refused("id_without_row"):
        converted(managed(False, return_remapped_features=True), hashing={"a": late})(batch([1], [], []))


@pytest.mark.parametrize("make", [mch, hash_zch])
def test_a_table_that_has_learned_nothing_can_have_buckets(make: Any) -> None:
    """It can then be cut by rows. In each bucket, the row that unknown ids read is MCH's row for such ids."""
    model = Model(managed(False, make)).eval()
    with torch.no_grad():
        next(inner(model).parameters())[ROWS - 1] = 7.0  # trained, before the module has given any row to an id
    buckets = recfx.HashConfig(buckets=2, rows=2 * ROWS, unseen="row" if make is mch else "zeros")
    ours = converted(model, hashing={"a": buckets}).eval()
    assert inner(ours).index("a").config.buckets == 2
    if make is mch:
        for left, right in zip(model(ASKED), ours(ASKED), strict=True):
            assert torch.equal(left, right)
    for lost in (None, recfx.HashConfig(dense_rows=3)):
        with refused("learned_ids_lost"):
            converted(model, hashing={"a": lost})


def test_an_inner_collection_that_is_also_called_with_rows() -> None:
    model = Model(learn(managed(True)))
    model.again = model.mc
    ours = converted(model)
    assert ours.again is ours.mc
    model.other = model.mc._embedding_module
    with refused("managed_collision_layout"):
        converted(model)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_hooks_run_as_before(inplace: bool) -> None:
    model, seen = Model(learn(managed(True))).eval(), []
    handle = model.mc.register_forward_hook(lambda module, *_: seen.append(module))
    model.mc.note = "the user's"
    ours = recfx.convert(model, (ASKED,), managed_collisions="convert", inplace=inplace)
    assert ours.mc.note == "the user's"
    seen.clear()
    ours(ASKED)
    assert seen == [ours.mc]
    handle.remove()
    ours(ASKED)
    assert len(seen) == (1 if inplace else 2)
    other = Model(learn(managed(True))).eval()
    other.mc._managed_collision_collection.register_forward_pre_hook(lambda *_: None)
    with refused("managed_collision_code", "mc"):
        recfx.convert(other, managed_collisions="convert")
    frozen = Model(learn(managed(True))).train()
    frozen.mc._managed_collision_collection.eval()
    with refused("managed_collision_layout", "mc"):
        recfx.convert(frozen, managed_collisions="convert")


def test_rows_of_a_sharded_collection_are_not_returned() -> None:
    from recfx.collections.raw_ids import rows_of_sharded
    from recfx.models.managed_collisions import take_over

    assert rows_of_sharded("mc").reason == "rows_of_sharded"
    model = Model(managed(True, return_remapped_features=True))
    (refused,) = take_over(model, shards=True).refused.values()
    assert refused[1].code == "rows_of_sharded"


class OneKey(nn.Module):
    """A model that can be traced and scripted."""

    def __init__(self, collection: Any, is_pooled: bool) -> None:
        super().__init__()
        self.mc, self.is_pooled = collection, is_pooled

    def forward(self, features: Any) -> torch.Tensor:
        embeddings, _ = self.mc(features)
        value = embeddings["f"]
        return value if self.is_pooled else value.values()


def test_a_file_that_would_keep_managed_collisions(tmp_path: Path) -> None:
    with refused("managed_collision", "mc", error=recfx.ExportError) as caught:
        recfx.export(Model(learn(managed(True))).eval(), tmp_path / "model.pt", (ASKED,))
    assert len(str(caught.value)) < 300


def test_rows_of_ids_are_not_exported(tmp_path: Path) -> None:
    ours = converted(OneKey(learn(managed(False, return_remapped_features=True)), False)).eval()
    with pytest.raises(recfx.ExportError, match="return_remapped_features") as caught:
        recfx.export(ours, tmp_path / "model.pt", (ASKED,))
    assert (caught.value.reason, caught.value.module_path) == ("rows_not_exported", "mc")
