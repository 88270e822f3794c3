"""A collection makes its graph again when a table is no longer what the graph was made for, and not otherwise."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.collections.compile_graph import REWRITING_KEY
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.ir import format_graph
from tests.builders.optimizers import attach
from tests.support.refusals import refused

NAMES = ("a", "b", "c")
BATCH = KeyedJaggedTensor(list(NAMES), torch.tensor([1, 2, 3, 1, 7]), lengths=torch.tensor([1, 1, 0, 1, 2, 0]))
RAW = recfx.HashConfig(dense_rows=0)


def standard() -> nn.ModuleDict:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=8, feature_names=[name]) for name in NAMES]
    return nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables)})


def groups(collection: HashEmbeddingBagCollection) -> list[tuple[str, ...]]:
    """The tables of each lookup, in the graph as data."""
    graph = collection.graph_module.meta[REWRITING_KEY].graph
    return [tuple(table.name for table in graph.tables(node)) for node in graph.of_kind("lookup", "hash_lookup")]


def half_of_b(collection: HashEmbeddingBagCollection) -> None:
    collection.embedding_bags["b"].half()


def other_data(collection: HashEmbeddingBagCollection) -> None:
    collection.weight("b").data = collection.weight("b").data.half()


@pytest.mark.parametrize("change", [half_of_b, other_data])
@pytest.mark.parametrize("hashing", [recfx.HashConfig(), RAW])
def test_tables_of_another_dtype_get_a_lookup_of_their_own(
    change: Callable[[HashEmbeddingBagCollection], None], hashing: recfx.HashConfig
) -> None:
    model = recfx.convert(standard(), hashing=hashing)
    attach(model, "adagrad")
    model.ebc(BATCH).values().sum().backward()
    assert groups(model.ebc) == [("a", "b", "c")]
    change(model.ebc)
    expected = copy.deepcopy(model.ebc)  # its graph is made for the tables as they are now
    for _ in range(2):
        actual, expected_values = model.ebc(BATCH).values(), expected(BATCH).values()
        assert torch.equal(actual, expected_values)
        actual.sum().backward()
        expected_values.sum().backward()
    assert groups(model.ebc) == groups(expected) == [("a", "c"), ("b",)]
    for name in NAMES:
        assert torch.equal(model.ebc.weight(name), expected.weight(name)), name


def test_the_graph_is_that_of_the_tables_as_they_are_as_soon_as_a_cast_returns() -> None:
    model = recfx.convert(standard())
    model.half()
    facts = model.ebc.graph_module.meta[REWRITING_KEY].graph.context.collections["ebc"].facts
    assert {fact.dtype for fact in facts.values()} == {torch.float16}
    assert format_graph(model.ebc.graph_module) == format_graph(recfx.convert(standard().half()).ebc.graph_module)


@pytest.mark.parametrize("prepare", [lambda model: None, lambda model: attach(model, "adam")])
def test_what_does_not_change_the_tables_leaves_the_graph(prepare: Callable[[nn.Module], None]) -> None:
    model = recfx.convert(standard())
    prepare(model)
    model.ebc(BATCH)
    graph = model.ebc.graph_module
    for change in (
        lambda: model.ebc(BATCH).values().sum().backward(),
        model.train,
        lambda: model.to("cpu"),
        lambda: model.ebc.weight("a").requires_grad_(False),
        model.float,
        lambda: model.load_state_dict(model.state_dict()),
    ):
        change()
        model.ebc(BATCH)
        assert model.ebc.graph_module is graph


def test_a_backward_that_was_open_when_a_table_changed() -> None:
    """It ends as that of the standard collection does, and the next step is that of the tables as they are now."""
    plain, model = standard(), recfx.convert(standard())
    grads = []
    for module in (plain.ebc, model.ebc):
        open_one = module(BATCH).values().sum()
        module.embedding_bags["b"].half()
        open_one.backward()
        module(BATCH).values().sum().backward()
        grads.append([module.embedding_bags[name].weight.grad for name in NAMES])
    for gradient, expected_gradient in zip(*grads, strict=True):
        assert torch.equal(gradient, expected_gradient)
        assert gradient.dtype == expected_gradient.dtype


def test_a_backend_that_does_not_serve_the_tables_any_more() -> None:
    model = recfx.convert(standard(), backend="fbgemm")
    before = model.ebc(BATCH).values()
    graph = model.ebc.graph_module
    model.double()  # does not raise halfway
    for _ in range(2):
        with pytest.raises(recfx.ConversionError, match="fbgemm"):
            model.ebc(BATCH)
    model.float()
    assert torch.equal(model.ebc(BATCH).values(), before)
    assert model.ebc.graph_module is graph


def test_copies_and_pickles_are_up_to_date() -> None:
    model = recfx.convert(standard())
    model.ebc.embedding_bags["b"].half()
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert groups(duplicate.ebc) == [("a", "c"), ("b",)]
        graph = duplicate.ebc.graph_module
        duplicate.ebc(BATCH)
        assert duplicate.ebc.graph_module is graph


@pytest.fixture
def graphs_set() -> Iterator[list[bool]]:
    """For each graph that a collection has taken since, whether any of its modules was in training mode then."""
    are_training: list[bool] = []

    def note(_: nn.Module, name: str, graph: nn.Module | None) -> None:
        if name == "graph_module" and graph is not None:
            are_training.append(any(module.training for module in graph.modules()))

    handle = register_module_module_registration_hook(note)
    yield are_training
    handle.remove()


def test_threads_that_serve_a_changed_table_make_its_graph_once_and_never_train(graphs_set: list[bool]) -> None:
    model = recfx.convert(standard(), hashing=RAW).eval()
    model.ebc.embedding_bags["b"].weight = nn.Parameter(model.ebc.weight("b").detach().half())
    graphs_set.clear()
    barrier = threading.Barrier(3)

    def serve() -> None:
        barrier.wait()
        model.ebc(BATCH)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert graphs_set == [False]


@pytest.mark.parametrize("converted_bags", [False, True])
def test_bags_that_are_replaced_all_at_once(converted_bags: bool) -> None:
    plain, model, other = standard(), recfx.convert(standard()), standard()
    for weight in other.parameters():
        nn.init.normal_(weight)
    plain.ebc.embedding_bags = other.ebc.embedding_bags
    model.ebc(BATCH)
    model.ebc.embedding_bags = (recfx.convert(other) if converted_bags else copy.deepcopy(other)).ebc.embedding_bags
    assert torch.equal(model.ebc(BATCH).values(), plain.ebc(BATCH).values())


def test_bags_that_do_not_fit_are_refused_when_they_are_put_in_place() -> None:
    model = recfx.convert(standard())
    bags, expected = model.ebc.embedding_bags, model.ebc(BATCH).values()
    other = copy.deepcopy(standard()).ebc.embedding_bags
    del other["b"]
    with refused("unsupported_bag", match="'b'"):
        model.ebc.embedding_bags = other
    assert model.ebc.embedding_bags is bags
    assert torch.equal(model.ebc(BATCH).values(), expected)


def without_weight(bags: nn.ModuleDict) -> None:
    bags["b"].weight = None


def without_bag(bags: nn.ModuleDict) -> None:
    del bags["b"]


def other_bags(bags: nn.ModuleDict) -> None:
    del bags["b"]
    bags["a"] = nn.EmbeddingBag(8, 4, include_last_offset=True, mode="sum")


@pytest.mark.parametrize("remove", [without_weight, without_bag, other_bags])
def test_a_table_that_is_gone_is_named(remove: Callable[[nn.ModuleDict], None]) -> None:
    model = recfx.convert(standard())
    remove(model.ebc.embedding_bags)
    for _ in range(2):
        with refused("unsupported_bag", match="'b'"):
            model.ebc(BATCH)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = standard().ebc

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values().sum(1)


@pytest.mark.parametrize("python_first", [False, True])
def test_lookups_of_a_whole_graph_follow_their_tables_by_themselves(python_first: bool) -> None:
    oracle = Sum()
    model = recfx.convert(oracle, (BATCH,), whole_graph=True)
    for model_or_oracle in (oracle, model):
        model_or_oracle.ebc.embedding_bags["b"].half()
    runs = [model.python_model, model] if python_first else [model, model.python_model]
    for run in runs:
        torch.testing.assert_close(run(BATCH), oracle(BATCH), rtol=1e-3, atol=1e-3)
    assert groups(model.ebc) == [("a", "b", "c")]
