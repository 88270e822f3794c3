"""``torch.compile`` of converted models."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

from recfx.collections.collection import unsharded_collections
from recfx.conversion.convert import convert
from recfx.errors import InputError
from recfx.hashing import HashConfig
from recfx.lowering.step import step_once
from recfx.optim.attached import attached_optimizers
from recfx.runtime import operators
from tests.builders.batches import bags, batch, raw_batch
from tests.builders.collections import sequences, table
from tests.builders.optimizers import attach
from tests.models.handwritten import Tower
from tests.support.refusals import refused


@pytest.fixture(autouse=True)
def _reset() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


class Pooled(nn.Module):
    """Sums and means of several dims; or sums with weights of ids, which are trained as well."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        of_second = {} if weighted else {"pooling": PoolingType.MEAN}
        tables = [table("t1", ["f1"]), table("t2", ["f2", "f3"], dim=4, **of_second), table("t3", ["f1"], dim=12)]
        self.ebc = EmbeddingBagCollection(tables, is_weighted=weighted)
        self.scale, self.linear = nn.Parameter(torch.rand(5)), nn.Linear(28, 4)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.ebc.is_weighted():
            scale, of_bags = self.scale[features.values() % 5], {"lengths": features.lengths()}
            features = KeyedJaggedTensor(features.keys(), features.values(), scale, **of_bags)
        return self.linear(self.ebc(features).values())


class Rows(nn.Module):
    """Rows that are not pooled; those of ``f2`` are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.ec, self.linear = sequences(), nn.Linear(8, 4)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ec(features)
        return self.linear(torch.cat([rows["f1"].values().sum(0, keepdim=True), rows["f3"].values() * 2]))


MODELS: dict[str, Callable[[], nn.Module]] = {"pooled": Pooled, "weighted": lambda: Pooled(True), "rows": Rows}


@pytest.mark.parametrize(
    ("backend", "dynamic", "kind", "optimizer"),
    [
        ("aot_eager", None, "pooled", "adagrad"),
        ("aot_eager", True, "weighted", None),
        ("eager", None, "weighted", "rowwise_adagrad"),
        ("aot_eager", None, "rows", None),
        ("aot_eager", None, "rows", "adam"),
        ("inductor", True, "pooled", "sgd"),
    ],
)
def test_one_graph_trains_and_evaluates(
    backend: str, dynamic: Any, kind: str, optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, weights and states of optimizers are those of the standard model, not compiled, and of the converted."""
    monkeypatch.setattr(step_once, "step_by_weight", None)  # all tables of a lookup are stepped together
    plain = MODELS[kind]()
    models = [plain, copy.deepcopy(plain), copy.deepcopy(plain)]
    for model in models if optimizer is not None else ():
        attach([weight for name, weight in model.named_parameters() if "embedding" in name], optimizer)
    target = "reference" if optimizer is None else "auto"
    models[1:] = [convert(model, backend=target) for model in models[1:]]
    called = [*models[:2], torch.compile(models[2], backend=backend, dynamic=dynamic, fullgraph=True)]
    graphs = []
    for number, size in enumerate((4, 6, 1, 3, 5)):
        if number == 3:  # what a scheduler and a checkpoint change is read in the next step
            state = copy.deepcopy(plain.state_dict())
            for model in models:
                model.load_state_dict(state)
                for own in _in_backward(model):
                    own.param_groups[0]["lr"] *= 0.5
        seen, features = [], batch(size, ("f1", "f3", "f1", "f2", "f4"))  # the last "f1" counts
        for model, call in zip(models, called, strict=True):
            with torch.no_grad():
                evaluated = call.eval()(features)
            output = call.train()(features)
            output.square().sum().backward()
            weights = [weight for weight in model.parameters() if not attached_optimizers(weight)]
            torch.optim.SGD(weights, 0.1).step()
            model.zero_grad()
            states = [list(own.state[own.param_groups[0]["params"][0]].values()) for own in _in_backward(model)]
            seen.append([evaluated, output.detach(), [weight.detach() for weight in model.parameters()], states])
        torch.testing.assert_close(seen[2], seen[1], rtol=1e-6, atol=1e-6)
        if optimizer in (None, "sgd", "adagrad"):  # the others keep other states, or step the rows of the batch alone
            torch.testing.assert_close(seen[2], seen[0], rtol=1e-5, atol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[2] == graphs[-1] <= 6  # none is made per batch
    assert not counters["graph_break"]


def _in_backward(model: nn.Module) -> list[Any]:
    return [own for weight in model.parameters() for own in attached_optimizers(weight)]


RAW = HashConfig.raw_ids()


@pytest.mark.parametrize(
    ("kind", "hashing"),
    [
        ("pooled", {"t1": RAW, "t2": None, "t3": RAW}),  # two lookups after one node that hashes
        ("pooled", HashConfig(dense_rows=0, on_full="share", unseen="share")),
        ("weighted", RAW),
        ("rows", RAW),
    ],
)
def test_one_graph_reads_raw_ids(kind: str, hashing: Any) -> None:
    """Outputs, and the counts that reports show, are those of the model that is not compiled."""
    model = convert(MODELS[kind](), hashing=hashing)
    model(batch(3))
    for size in (5, 4):  # rows that were given out between compiled calls are found
        twin = copy.deepcopy(model.eval())
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for features in (batch(size), batch(0), batch(1)):
            with torch.no_grad():
                torch.testing.assert_close(compiled(features), twin(features), rtol=0, atol=0)
        for one, other in zip(*(unsharded_collections(made).values() for made in (model, twin)), strict=True):
            for name in one.tables_with_index():
                assert torch.equal(one.index(name).eval_counts, other.index(name).eval_counts)
                assert one.index(name).eval_counts[0] > 0
        model.train()(batch(6))
    assert counters["stats"]["unique_graphs"] <= 4


KEYS = ["f1", "f2", "f3"]


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        (bags({"f1": [[1]], "f2": [[1]]}), "missing_feature"),
        (bags({"f1": [[1]], "f2": [[-1]], "f3": [[1]]}), "id_out_of_range"),
        (raw_batch(), "id_out_of_range"),
        (
            KeyedJaggedTensor(KEYS, torch.rand(3), lengths=torch.ones(3, dtype=torch.int64)),
            "wrong_id_dtype",
        ),
        (KeyedJaggedTensor(KEYS, torch.ones(3).long(), lengths=torch.tensor([1, 4, -2])), "bad_lengths"),
    ],
)
def test_bad_batches_are_refused_by_compiled_code(features: KeyedJaggedTensor, reason: str) -> None:
    model = Tower()
    attach(model.ebc.parameters(), "adam")
    converted = convert(model)
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    for one in (converted, compiled):
        with pytest.raises(InputError) as caught:
            one(features)
        assert (caught.value.reason, caught.value.module_path) == (reason, "ebc")


class Twice(Tower):
    """Two lookups of one batch, and another reader of a table."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        both = self.ebc(features).values() + self.ebc(features).values()
        return self.linear(both) + self.ebc.embedding_bags["t1"].weight.square().sum()


@pytest.mark.parametrize("kind", [Twice, Tower])
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_optimizers_hooks_and_copies_that_come_later(kind: type[Tower], optimizer: str | None) -> None:
    model = convert(kind())
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for attached in (None, optimizer, None):
        if attached is not None:
            for one in (model, twin):
                one.zero_grad()
                attach(one.ebc.parameters(), attached)
        features, others = batch(4), batch(5)
        for one in (compiled, twin):  # the backward of the first forward comes last
            losses = [one(features).sum(), one(others).sum()]
            for loss in reversed(losses) if kind is Tower else [sum(losses)]:
                loss.backward()
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
        gradients = [[parameter.grad for parameter in one.parameters()] for one in (model, twin)]
        torch.testing.assert_close(*[[one for one in of_model if one is not None] for of_model in gradients])
    before, other = [parameter.detach().clone() for parameter in model.parameters()], copy.deepcopy(compiled)
    attach(other.ebc.parameters(), "sgd")
    other(features).sum().backward()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not torch.equal(other.ebc.weight("t1"), model.ebc.weight("t1"))
    if optimizer is not None:
        model.ebc.weight("t1").register_hook(lambda gradient: gradient * 2)
        with refused("outdated_graph", "ebc", match="call it again"):
            compiled(features)
        twin.ebc.weight("t1").register_hook(lambda gradient: gradient * 2)
        for one in (compiled, twin):
            one(features).sum().backward()
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def test_operators_and_nodes_that_are_freed() -> None:
    model = convert(Pooled(True))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    features = batch(4, (*KEYS, "f4"), weighted=True)
    compiled(features).sum().backward()
    select, lookup = (model.ebc.graph_module.get_submodule(name) for name in ("select_features", "lookup"))
    ids, lengths, offsets, scale = features.values(), features.lengths(), features.offsets(), features.weights()
    hashed = convert(Pooled(), hashing={"t1": RAW, "t2": None, "t3": RAW}).eval()
    hash_ids = hashed.ebc.graph_module.get_submodule("hash_ids")
    weights, read = lookup.weights_now(), [weight.detach() for weight in lookup.weights_now()]
    of_gradients = [torch.rand(4, 28)], [True] * 3, False, read
    for operator, arguments in (
        ("check_batch", (ids, scale, lengths, False, features.keys(), 4, True, operators.new_call(select))),
        ("look_up", (ids, offsets, scale.clone().requires_grad_(), [], 4, weights, [], operators.new_call(lookup))),
        ("look_up_backward", (ids, offsets, scale, [], *of_gradients, operators.new_call(lookup))),
        ("find_ids", (ids, offsets, 4, operators.new_call(hash_ids))),
        ("id_places", (lengths, offsets[:-1], ids.numel())),
    ):
        torch.library.opcheck(getattr(torch.ops.recfx, operator).default, arguments)
    del select, lookup, hashed, hash_ids, weights, read, of_gradients, arguments
    weight = weakref.ref(model.ebc.weight("t1"))
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None
    assert not operators._NODES


def test_graphs_on_the_disk_are_of_tables_with_the_same_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each process counts its calls from 0, and torch finds what others have compiled by what stands in a graph."""
    features = batch(2)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for first, second in ((["f1"], ["f2", "f3"]), (["f1", "f2"], ["f3"])):
        torch._dynamo.reset()
        monkeypatch.setattr(operators, "_next", itertools.count())
        plain = EmbeddingBagCollection([table("t1", first), table("t2", second, dim=4)])
        converted = convert(copy.deepcopy(plain))
        compiled = torch.compile(lambda features, called: called(features).values() * 2, fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(features, converted), plain(features).values() * 2)


def test_what_is_not_one_graph_says_which_node_and_why() -> None:
    model = convert(Tower(), hashing=HashConfig(dense_rows=0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"recfx: ebc_hash_lookup .* eval mode only"):
        torch.compile(model, backend="eager", fullgraph=True)(batch(4))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    for size in (4, 6):
        features, outputs = batch(size), []
        for one in (twin, compiled):
            one.zero_grad()
            outputs.append(one(features))
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(*outputs)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
