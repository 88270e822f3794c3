"""Collections take over what is attached to their weights, each for the graph that it runs itself."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.collections.copy_modules import copy_modules, copy_with_tensors
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.optim.attached import attached_optimizers, set_attached
from recfx.runtime.lookup import Lookup
from tests.builders.optimizers import attach

BATCH = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 0, 1]))


def collection() -> HashEmbeddingBagCollection:
    tables = [
        recfx.HashEmbeddingBagConfig(num_embeddings=8, embedding_dim=4, name=name, feature_names=[name])
        for name in ("a", "b")
    ]
    return HashEmbeddingBagCollection(tables)


def lookups(module: torch.nn.Module) -> int:
    return sum(isinstance(part, Lookup) for part in module.modules())


def step(module: torch.nn.Module) -> None:
    module(BATCH).values().sum().backward()


@pytest.mark.parametrize("first", ["original", "copy"])
def test_copies_around_the_same_weights_make_their_own_graphs_anew(first: str) -> None:
    original = collection()
    duplicate, _ = copy_modules(original)
    assert lookups(original) == lookups(duplicate) == 1
    attach([original.weight("a")], torch.optim.SGD, lr=1.0)
    both = (original, duplicate) if first == "original" else (duplicate, original)
    for module in both:
        before = original.weight("a").detach().clone()
        step(module)
        assert lookups(module) == 2, "one lookup would step both tables, or none"
        assert not torch.equal(original.weight("a"), before)
        assert original.weight("b").grad is not None
        original.weight("b").grad = None


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(
    "duplicated", [copy.deepcopy, copy_with_tensors, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_keeps_its_optimizers_and_follows_its_own_weights(duplicated: object, is_trained: bool) -> None:
    original = collection()
    attach([original.weight("a")], torch.optim.SGD, lr=1.0)
    if is_trained:
        step(original)
    assert callable(duplicated)
    duplicate = duplicated(original)
    assert list(duplicate.fused_optimizers()) == ["a"]
    before = duplicate.weight("a").detach().clone()
    step(duplicate)
    assert not torch.equal(duplicate.weight("a"), before)
    attach([duplicate.weight("b")], torch.optim.SGD, lr=1.0)
    step(duplicate)
    assert (sorted(duplicate.fused_optimizers()), sorted(original.fused_optimizers())) == (["a", "b"], ["a"])


def test_an_optimizer_in_the_place_of_another_is_noticed() -> None:
    """Whichever memory it gets: the other one stays until then."""
    module = collection()
    weight = module.weight("a")
    set_attached(weight, [torch.optim.RMSprop([weight])])
    module(BATCH)
    assert list(module.not_fused) == ["a"]
    other = weakref.ref(attached_optimizers(weight)[0])
    for is_kept in (True, False):
        set_attached(weight, [torch.optim.SGD([weight])])
        gc.collect()
        assert (other() is not None) is is_kept
        module(BATCH)
    assert list(module.fused_optimizers()) == ["a"]
