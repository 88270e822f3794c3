"""``lookup`` and ``hash_lookup``: what they refuse to train, copies, and how many steps they take."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.errors import ConversionError, InputError
from recfx.runtime.lookup import Lookup
from tests.builders.batches import batch, one_bag
from tests.builders.collections import one_table, sequences, table
from tests.builders.optimizers import attach
from tests.support.refusals import refused


def lookup_of(optimizer: str = "sgd") -> tuple[Lookup, nn.Parameter]:
    """The lookup of an adopted table that was called once, and its weight."""
    model = nn.ModuleDict({"ebc": one_table()})
    if optimizer:
        attach(model, optimizer)
    ebc: Any = recfx.convert(model)["ebc"]
    (lookup,) = [module for module in ebc.graph_module.modules() if isinstance(module, Lookup)]
    lookup(one_bag(1, 2))
    return lookup, ebc.weight("t")


def hook(lookup: Lookup, weight: nn.Parameter) -> None:
    weight.register_post_accumulate_grad_hook(lambda parameter: None)


def another_tensor(lookup: Lookup, weight: nn.Parameter) -> None:
    lookup.store.own_weights()
    lookup.store.bags["t"].weight = nn.Parameter(weight.detach().clone())


def decay(lookup: Lookup, weight: nn.Parameter) -> None:
    lookup.store.optimizers["t"].group["maximize"] = True


def another_shape(lookup: Lookup, weight: nn.Parameter) -> None:
    lookup.store.bags["t"].weight = nn.Parameter(torch.zeros(9, 4))


@pytest.mark.parametrize(
    ("change", "reason", "words", "without_grad"),
    [
        (hook, "gradient_hook", "table 't': .*it would never run", True),
        (another_tensor, "fused_weight_replaced", "replaced the weight of table 't'", False),
        (decay, "optimizer_setting_changed", "table 't' was given maximize=True", False),
        (
            another_shape,
            "table_shape_changed",
            r"'t' has shape \(9, 4\), but the table was converted with \(10, 4\)",
            True,
        ),
    ],
)
def test_what_changed_after_the_conversion_is_refused(
    change: Callable[[Lookup, nn.Parameter], None], reason: str, words: str, without_grad: bool
) -> None:
    lookup, weight = lookup_of()
    change(lookup, weight)
    with refused(reason, "ebc", match=words):
        lookup(one_bag(1, 2))
    with torch.no_grad():
        if without_grad:
            with pytest.raises(ConversionError):
                lookup(one_bag(1, 2))
        else:
            assert lookup(one_bag(1, 2)).shape == (1, 4)


def test_a_hook_on_a_table_without_a_fused_optimizer_is_its_own_affair() -> None:
    lookup, weight = lookup_of("")
    hook(lookup, weight)
    assert lookup(one_bag(1, 2)).shape == (1, 4)


def test_the_kernel_that_a_pass_has_decided_on_stays_when_tables_change() -> None:
    lookup, _ = lookup_of("")
    lookup.choose_kernel("reference")
    lookup.store.bags.to(torch.bfloat16)
    lookup(one_bag(1, 2))
    assert lookup.now == {"dtype": "bfloat16", "kernel": "reference"}


def test_a_batch_on_meta_needs_tables_on_meta() -> None:
    lookup, _ = lookup_of("")
    with refused("several_devices", "ebc", match="table 't' is on cpu", error=InputError) as caught:
        lookup(one_bag(1).to(torch.device("meta")))
    assert "pass a batch with data; for shapes alone" in caught.value.what_to_do
    lookup.store.bags.to("meta")
    for device in ("cpu", "meta"):
        assert lookup(one_bag(1).to(torch.device(device))).is_meta


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_choose_their_own_kernel(copied: Callable[[Lookup], Lookup]) -> None:
    lookup, _ = lookup_of("")
    assert (lookup.kernel, lookup.has_finding_kernel) == ("cpu", True)
    its_copy = copied(lookup)
    assert (its_copy.kernel, its_copy.has_finding_kernel) == ("", False)
    assert torch.equal(its_copy(one_bag(1, 2)), lookup(one_bag(1, 2)))
    assert its_copy.kernel == "cpu"


def test_a_kernel_is_chosen_again_for_tables_of_another_type() -> None:
    lookup, _ = lookup_of("")
    lookup.store.bags.to(torch.float64)
    assert (lookup.kernel, lookup.dtype) == ("", torch.float64)
    assert lookup(one_bag(1, 2)).shape == (1, 4)
    assert lookup.kernel == "reference"
    lookup.store.bags["t"]._parameters["weight"] = None
    assert lookup.dtype is None


def test_what_a_graph_prints_of_a_table_on_another_rank_is_its_description() -> None:
    lookup, _ = lookup_of("adagrad")
    table = replace(lookup.tables[0], name="elsewhere", dtype=torch.float16)
    remote = copy.copy(lookup)
    remote.tables = (table,)
    assert (remote.dtype, remote.optimizer, remote.kernel) == (torch.float16, "", "")
    assert (lookup.dtype, lookup.optimizer) == (torch.float32, "adagrad")


PLAIN: dict[str, Any] = {}
EVICTS = {"on_full": "evict"}
ADMITS = {"admit_after": 2}


def trained(config: dict[str, Any]) -> Any:
    plain = one_table()
    attach(plain, "sgd")
    model = recfx.convert(torch.nn.ModuleDict({"ebc": plain}), hashing=recfx.HashConfig(dense_rows=0, **config))
    model["ebc"](one_bag(1, 2, 1, 2)).values().sum().backward()
    return model["ebc"]


def ranges(run: Any) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    names = [event.name for event in profiled.events() if event.name.startswith("ebc_")]
    return [name.removeprefix("ebc_") for name in names]


ONE_STEP, TWO_STEPS = ["hash_lookup"], ["hash_lookup", "hash_ids", "lookup"]


@pytest.mark.parametrize(
    ("config", "training", "grad_mode", "steps"),
    [
        (PLAIN, True, True, ONE_STEP),
        (PLAIN, False, True, ONE_STEP),
        (PLAIN, False, False, ONE_STEP),
        (EVICTS, True, True, TWO_STEPS),
        (EVICTS, False, True, TWO_STEPS),
        (EVICTS, False, False, ONE_STEP),
        (ADMITS, True, False, TWO_STEPS),
        (ADMITS, False, True, ONE_STEP),
    ],
)
def test_what_one_kernel_can_do_takes_one_step(
    config: dict[str, Any], training: bool, grad_mode: bool, steps: list[str]
) -> None:
    model = trained(config).train(training)
    with torch.set_grad_enabled(grad_mode):
        names = ranges(lambda: model(one_bag(1, 2)))
    assert [name for name in names if name not in ("select_features", "keyed_tensor")] == steps


def test_a_forward_that_is_run_again_takes_two_steps() -> None:
    model = trained(PLAIN)
    scale = torch.ones(1, requires_grad=True)
    output = checkpoint(lambda scale: model(one_bag(1, 2)).values() * scale, scale, use_reentrant=False)
    names = ranges(lambda: output.sum().backward())
    assert [name for name in names if name not in ("select_features", "keyed_tensor")] == [
        *TWO_STEPS, "hash_lookup (backward)", "hash_lookup (step)",
    ]  # fmt: skip


@pytest.mark.parametrize("optimizer", ["", "sgd"])
@pytest.mark.parametrize("backend", ["cpu", "fbgemm", "reference"])
@pytest.mark.parametrize("changed", ["ids", "weights", "table"])
def test_what_a_backward_reads_again_may_not_have_changed(changed: str, backend: str, optimizer: str) -> None:
    ebc = EmbeddingBagCollection(tables=[table("t", ["f"])], is_weighted=True)
    model: Any = recfx.convert(ebc, backend=backend)
    if optimizer:
        attach(model, optimizer)
    weights = torch.ones(2, requires_grad=changed == "table")
    features = one_bag(1, 2, weights=weights)
    output, before = model(features).values(), model.weight("t").detach().clone()
    with torch.no_grad():
        {"ids": features.values(), "weights": weights, "table": model.weight("t")}[changed].mul_(2)
    plain = backend == "reference" and not optimizer  # its backward is torch's own
    with (
        pytest.raises(RuntimeError, match="inplace")
        if plain
        else refused("changed_before_backward", "t", error=InputError)
    ):
        output.sum().backward()
    assert torch.equal(model.weight("t"), before * 2 if changed == "table" else before)


@pytest.mark.parametrize("changed", ["ids", "weights"])
def test_a_backward_reads_inference_tensors_as_they_were(changed: str) -> None:
    gradients = []
    for factor in (1, 2):
        model: Any = recfx.convert(EmbeddingBagCollection(tables=[table("t", ["f"])], is_weighted=True))
        with torch.inference_mode():
            features = one_bag(1, 2, weights=torch.ones(2))
        output = model(features).values()
        with torch.inference_mode():
            {"ids": features.values(), "weights": features.weights()}[changed].mul_(factor)
        output.sum().backward()
        gradients.append(model.weight("t").grad.to_dense())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("optimizer", ["", "adagrad"])
@pytest.mark.parametrize("form", ["transposed", "columns", "negated"])
def test_a_table_whose_backward_meets_another_layout(form: str, optimizer: str) -> None:
    ebc = EmbeddingBagCollection(tables=[table("t", ["f"])], is_weighted=True)
    model: Any = recfx.convert(ebc)
    if optimizer:
        attach(model, optimizer)
    weights = torch.ones(2, requires_grad=form != "negated" or not optimizer)
    output, rows = model(one_bag(1, 2, weights=weights)).values(), model.weight("t").data
    model.weight("t").data = {
        "transposed": rows.t().contiguous().t(),
        "columns": torch.cat([rows, rows], dim=1)[:, : rows.shape[1]],
        "negated": torch._neg_view(-rows),
    }[form]
    if form == "negated" and not optimizer:
        output.sum().backward()
        torch.testing.assert_close(weights.grad, rows[1:3].sum(dim=1))
        return
    with refused("changed_before_backward", "t", error=InputError):
        output.sum().backward()
    assert torch.equal(model.weight("t"), rows)


@pytest.mark.parametrize("backend", ["cpu", "fbgemm", "reference"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_fused_step_changes_what_weights_of_ids_read_in_a_backward(again: bool, shared: bool, backend: str) -> None:
    keys = ["f", "g"] if shared else ["f"]
    ebc = EmbeddingBagCollection(tables=[table(f"t{key}", [key]) for key in keys], is_weighted=True)
    ebc.embedding_bags[f"t{keys[-1]}"].weight = ebc.embedding_bags["tf"].weight
    model: Any = recfx.convert(ebc, backend=backend)
    attach(model, "sgd")

    def loss(needs_gradient: bool) -> torch.Tensor:
        weights = torch.ones(2 * len(keys), requires_grad=needs_gradient)
        batch = KeyedJaggedTensor(keys, torch.arange(2 * len(keys)), weights, lengths=torch.full((len(keys),), 2))
        return model(batch).values().sum()

    first, second = loss(True), loss(True)
    first.backward(retain_graph=again)
    with refused("changed_before_backward", error=InputError):
        (first if again else second).backward()
    first, second = loss(False), loss(False)  # these backwards do not read the table
    first.backward(retain_graph=again)
    (first if again else second).backward()


def test_rows_of_a_sequence_whose_weight_has_a_hook_are_those_of_the_forward() -> None:
    model: Any = recfx.convert(sequences())
    model.weight("s1").register_hook(lambda gradient: None)
    gradients, given = [], batch(3)
    for changed in (False, True):
        features = KeyedJaggedTensor(given.keys(), given.values().clone(), lengths=given.lengths())
        output = sum(jagged.values().sum() for jagged in model(features).values())
        if changed:
            features.values().zero_()
        output.backward()
        gradients.append(model.weight("s1").grad.clone())
        model.zero_grad()
    assert torch.equal(*gradients)
