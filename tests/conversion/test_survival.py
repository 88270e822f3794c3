"""What users hold on to: names, objects, hooks, modes, copies, checkpoints and optimizers outlive the conversion."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig

from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.errors import ConversionError
from recfx.hashing import HashConfig, HashIndex, state
from recfx.kernels.index.index_buffers import IndexBuffers, IndexPolicy, allocate_buffers
from tests.builders.batches import RAW_ID, batch, raw_batch
from tests.builders.collections import collection
from tests.builders.optimizers import attach
from tests.models.handwritten import Tower, process_group
from tests.support.refusals import refused

# Names and objects


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize(
    "hashing", [HashConfig(), None, HashConfig(rows=50), HashConfig(dense_rows=0)],
    ids=["dense", "static", "grown", "hashed"],
)  # fmt: skip
def test_parameters_keep_names_and_identity(inplace: bool, hashing: HashConfig | None) -> None:
    model = Tower()
    before = dict(model.named_parameters())
    after = dict(convert(model, hashing=hashing, inplace=inplace).named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())


def test_code_that_asks_for_the_class_finds_it() -> None:
    """Code tells pooled collections, sequences and others apart by their classes."""
    configs = [EmbeddingConfig(name="s", num_embeddings=9, embedding_dim=4, feature_names=["f"])]
    converted = convert(nn.ModuleList([collection(), EmbeddingCollection(configs), nn.Identity()]))
    asked = [(isinstance(one, EmbeddingBagCollection), isinstance(one, EmbeddingCollection)) for one in converted]
    assert asked == [(True, False), (False, True), (False, False)]


def test_modes_survive_also_mixed_ones() -> None:
    model = Tower().train()
    model.ebc.eval()
    converted = convert(model, (batch(3),), verify=False)
    assert converted.training
    assert not converted.ebc.training
    assert not converted.ebc.graph_module.training
    assert not converted.eval().linear.training
    assert all(module.training for module in converted.train().modules())


# Hooks


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_hooks_of_every_kind_still_run_and_know_their_module(inplace: bool) -> None:
    calls: list[str] = []
    modules: list[nn.Module] = []
    model = Tower()

    def note(name: str) -> Callable[..., None]:
        return lambda module, *args, **kwargs: (calls.append(name), modules.append(module))[0]

    handles = [
        model.ebc.register_forward_hook(note("forward")),
        model.ebc.register_forward_hook(note("forward with keywords"), with_kwargs=True),
        model.ebc.register_forward_pre_hook(note("before forward")),
        model.linear.register_full_backward_hook(note("backward")),
        model.ebc.register_state_dict_post_hook(note("state_dict")),
        model.ebc.register_state_dict_pre_hook(note("before state_dict")),
        model.ebc.register_load_state_dict_pre_hook(note("before load")),
        model.ebc.embedding_bags["t1"].register_load_state_dict_pre_hook(note("before load of a table")),
        model.linear.register_load_state_dict_pre_hook(note("before load of linear")),
        model.ebc.register_load_state_dict_post_hook(note("load")),
    ]
    removed = model.ebc.register_forward_hook(note("removed"))
    removed.remove()
    converted = convert(model, inplace=inplace)

    def use() -> None:
        converted(batch(3)).sum().backward()
        converted.load_state_dict(converted.state_dict())

    use()
    expected = ["before forward", "forward", "forward with keywords", "backward", "before state_dict", "state_dict",
                "before load", "before load of a table", "load", "before load of linear"]  # fmt: skip
    assert calls == expected
    assert {id(module) for module in modules} == {id(converted.get_submodule(path)) for path in (
        "ebc", "ebc.embedding_bags.t1", "linear")}  # fmt: skip
    for handle in handles:
        handle.remove()
    use()
    assert calls == expected * (1 if inplace else 2)  # those of a copy are its own


# Copies


@pytest.mark.parametrize("whole_graph", [False, True], ids=["collections", "whole_graph"])
@pytest.mark.parametrize("hashing", [HashConfig(), HashConfig(dense_rows=0)], ids=["dense", "hashed"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_independent_and_equal(whole_graph: bool, hashing: HashConfig, how: str) -> None:
    model = convert(Tower(), (batch(3),), hashing=hashing, whole_graph=whole_graph, verify=False)
    features = batch(5)
    model(features)  # hashed tables: rows for these ids
    before = model(features).detach().clone()
    if how == "deepcopy":
        duplicate = copy.deepcopy(model)
    elif how == "pickle":
        duplicate = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        duplicate = torch.load(buffer, weights_only=False)
    assert [name for name, _ in duplicate.named_parameters()] == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(duplicate(features), before, rtol=0, atol=0)
    torch.testing.assert_close(duplicate.eval()(features), before, rtol=0, atol=0)
    with torch.no_grad():
        duplicate.ebc.embedding_bags["t1"].weight.zero_()
        duplicate.linear.bias.add_(1)
    torch.testing.assert_close(model(features), before, rtol=0, atol=0)
    changed = duplicate(features)
    assert not torch.allclose(changed, before)
    changed.sum().backward()
    assert duplicate.ebc.embedding_bags["t1"].weight.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


# Converting again, and failing


def test_converting_twice_changes_nothing() -> None:
    model = Tower()
    converted = convert(model, hashing=HashConfig(dense_rows=0))
    converted(raw_batch())
    again = convert(converted)
    assert [type(module) for module in again.modules()] == [type(module) for module in converted.modules()]
    assert again.ebc.hash_indexes["t1"].items()[0].tolist() == [RAW_ID]
    assert [id(parameter) for parameter in again.parameters()] == [id(parameter) for parameter in model.parameters()]
    assert isinstance(convert(again, inplace=True).ebc, HashEmbeddingBagCollection)


def test_a_whole_graph_is_converted_already() -> None:
    whole = convert(Tower(), (batch(3),), whole_graph=True, verify=False)
    features = batch(4)
    before = whole(features)
    torch.testing.assert_close(convert(whole)(features), before, rtol=0, atol=0)
    again = convert(whole, (batch(3),), whole_graph=True, verify=False)
    torch.testing.assert_close(again(features), before, rtol=0, atol=0)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("why", ["second_collection", "tied", "optimizer"])
def test_a_failure_leaves_everything_as_it_was(inplace: bool, why: str) -> None:
    """A table that had grown by then shrinks again."""
    model = Tower()
    model.zz_last = collection()
    if why == "second_collection":
        model.zz_last.embedding_bags["t1"].max_norm = 1.0
    elif why == "tied":
        model.zz_last.embedding_bags["t1"].weight = model.zz_last.embedding_bags["t2"].weight
    else:
        attach(model.zz_last, torch.optim.SGD, nesterov=True, momentum=0.5)
    features = batch(4)
    before = model(features).detach().clone()
    modules, parameters = list(model.modules()), list(model.parameters())
    storages = [parameter.data_ptr() for parameter in parameters]
    with pytest.raises(ConversionError):
        convert(model, hashing=HashConfig(rows=50), inplace=inplace)
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert [parameter.data_ptr() for parameter in parameters] == storages
    assert {tuple(bag.weight.shape) for bag in model.ebc.embedding_bags.values()} == {(20, 8)}
    assert all(bag.num_embeddings == 20 for bag in model.ebc.embedding_bags.values())
    assert torch.equal(model(features), before)
    model(features).sum().backward()


# Growing a table that has a past


def test_a_table_with_a_gradient_can_grow() -> None:
    model = Tower()
    features = batch(5)
    model(features).sum().backward()
    gradient_before = model.ebc.embedding_bags["t1"].weight.grad.clone()
    converted = convert(model, hashing=HashConfig(rows=50))
    converted(features).sum().backward()
    gradient = converted.ebc.embedding_bags["t1"].weight.grad
    assert gradient.shape == (50, 8)
    torch.testing.assert_close(gradient[:20], 2 * gradient_before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_stepped", [True, False])
def test_an_ordinary_optimizer_does_not_step_with_the_state_of_fewer_rows(has_stepped: bool) -> None:
    model, features = Tower(), batch(5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(features).sum().backward()
    if has_stepped:
        optimizer.step()
    converted = convert(model, hashing=HashConfig(rows=50))
    converted(features).sum().backward()
    before = converted.ebc.embedding_bags["t1"].weight.detach().clone()
    if has_stepped:
        with refused("optimizer_holds_state", "ebc"):
            optimizer.step()
        assert torch.equal(converted.ebc.embedding_bags["t1"].weight, before)
        optimizer = torch.optim.AdamW(converted.parameters())
    optimizer.step()
    assert not torch.equal(converted.ebc.embedding_bags["t1"].weight, before)


def test_a_table_under_ddp_does_not_grow() -> None:
    """DistributedDataParallel's buckets have the old shape."""
    with process_group():
        model = nn.parallel.DistributedDataParallel(Tower())
        with refused("wrapped_in_ddp", "module.ebc", match="buckets"):
            convert(model, hashing=HashConfig(rows=50))
        model(batch(4)).sum().backward()
        assert model.module.ebc.embedding_bags["t1"].weight.grad.shape == (20, 8)


# Other ways to call a model


def test_an_index_that_no_memory_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_on_cpu(policy: IndexPolicy, device: str) -> IndexBuffers:
        if device == "cpu":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return allocate_buffers(policy, device)

    monkeypatch.setattr(state, "allocate_buffers", fails_on_cpu)
    with refused("no_memory_for_rows", "users"):
        HashIndex(10**9, name="users")
