"""What is around a forward: hooks, the default device, batches in flight, profiles."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import recfx
from recfx.collections.copy_modules import carry_hooks
from recfx.hashing import HashConfig, HashIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.index.index_buffers import BATCHES
from recfx.lowering.step import profiler_ranges
from recfx.runtime import base as hooks
from recfx.runtime.in_flight import BatchInFlight
from tests.builders.batches import one_bag
from tests.builders.collections import one_table, table
from tests.builders.optimizers import attach

PRODUCT = Path(recfx.__file__).parent


def test_the_list_is_torchs() -> None:
    not_hooks = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
    assert set(vars(nn.Module())) - not_hooks == set(hooks.MODULE_HOOKS)
    assert {name for name in vars(nn.Module()) if hooks.holds_hooks(name)} == {
        name for name in hooks.MODULE_HOOKS if name != "_is_full_backward_hook"
    }


REGISTRATIONS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]


@pytest.mark.parametrize("registration", REGISTRATIONS)
def test_what_is_asked_of_hooks(registration: str) -> None:
    module, replacement = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not hooks.has_call_hooks(module)
    getattr(module, registration)(lambda *_: None)
    assert hooks.has_forward_hooks(module) is registration.startswith("register_forward")
    assert hooks.has_call_hooks(module) is registration.startswith(("register_forward", "register_full_backward"))
    assert bool(hooks.load_hooks(module)) is (registration == "register_load_state_dict_pre_hook")
    carry_hooks(module, replacement)
    for name in hooks.MODULE_HOOKS:
        carried, of_module = vars(replacement)[name], vars(module)[name]
        assert carried.keys() == of_module.keys() if isinstance(of_module, dict) else carried == of_module
        assert vars(replacement)[name] is not vars(module)[name] or not isinstance(vars(module)[name], dict)


def test_load_hooks_are_away_only_inside() -> None:
    module = nn.Linear(2, 2)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    before = hooks.load_hooks(module)

    def fail() -> None:
        with hooks.without_load_hooks(module):
            assert not hooks.load_hooks(module)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert hooks.load_hooks(module) is before


def test_nobody_else_names_them() -> None:
    own = [name for name in hooks.MODULE_HOOKS if name != "_backward_hooks"]  # tensors have those as well
    files = {
        path.relative_to(PRODUCT).as_posix()
        for path in PRODUCT.rglob("*.py")
        if any(f'"{name}"' in (text := path.read_text()) or f".{name}" in text for name in own)
    }
    # The index is below runtime, and runs its own; a sharded collection has hooks of recfx.
    assert files == {"runtime/base.py", "hashing/storage.py", "collections/sharding/collection.py"}


HASHINGS: dict[str, recfx.HashConfig] = {
    "adopted": recfx.HashConfig(),
    "hashed": recfx.HashConfig(dense_rows=0, unseen="share"),
    "evicting": recfx.HashConfig(dense_rows=0, on_full="evict"),
    "admitting": recfx.HashConfig(dense_rows=0, on_full="share", admit_after=2, unseen="share"),
}
CPU = torch.device("cpu")
IDS = torch.tensor([1, 2, 3, 3, 4, 5, 6, 7, 1, 2, 0, 3, 3, 9, 8])
SCALE = torch.linspace(0.5, 2.0, 15)
LENGTHS = torch.tensor([3, 2, 0, 3, 1, 1, 1, 2, 2])
INVERSE = (["f2", "f1", "x"], torch.tensor([[0, 1, 2, 1], [2, 1, 0, 2], [0, 0, 0, 0]]))


def batches(is_weighted: bool, trains_weights: bool) -> list[KeyedJaggedTensor]:
    """In the collection's order; permuted; with inverse indices."""
    forms: list[tuple[list[str], dict[str, Any]]] = [
        (["f1", "f2", "f3"], {}),
        (["f2", "x", "f1", "f3"], {"lengths": torch.tensor([3, 2, 0, 3, 1, 1, 3, 2])}),
        (["f2", "f1", "f3"], {"inverse_indices": (["f2", "f1", "f3"], INVERSE[1])}),
    ]
    return [
        KeyedJaggedTensor(
            keys,
            IDS,
            SCALE.clone().requires_grad_(trains_weights) if is_weighted else None,
            **{"lengths": LENGTHS, **more},
        )
        for keys, more in forms
    ]


def trained(hashing: str, backend: str, optimizer: str, is_weighted: bool, default: str) -> list[torch.Tensor]:
    """Outputs, gradients and the state of a collection that was converted and run under a default device."""
    torch.manual_seed(0)
    pooling = PoolingType.SUM if is_weighted else PoolingType.MEAN
    plain = EmbeddingBagCollection(
        [table("t1", ["f1"], dim=4, pooling=pooling), table("t2", ["f2", "f3"], dim=8, pooling=pooling)],
        is_weighted=is_weighted,
        device=CPU,
    )
    if optimizer:
        attach(plain, optimizer)
    trains_weights = is_weighted and hashing != "admitting"  # of which no shared row gives a gradient
    features = batches(is_weighted, trains_weights)
    replayed = hashing not in ("evicting", "admitting")  # which activation checkpointing may not run again
    run = partial(checkpoint, use_reentrant=False) if replayed else lambda function, scale: function(scale)
    with torch.device(default):
        model: Any = recfx.convert(plain, hashing=HASHINGS[hashing], backend=backend)
        outputs = []
        for training in (True, True, False):
            model.train(training)
            for kjt in features:
                scale = torch.ones(1, device=CPU, requires_grad=True)
                values = run(lambda scale, kjt=kjt: model(kjt).values() * scale, scale)
                values.square().sum().backward()
                outputs += [values.detach(), scale.grad]
                if trains_weights:
                    outputs.append(kjt.weights().grad.clone())  # type: ignore[union-attr]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert bool(gradients) == (not optimizer)
    states = [value for _, fused in sorted(model.fused_optimizers().items()) for value in fused.state.values()]
    return [*outputs, *gradients, *states, *model.state_dict().values()]


@pytest.mark.parametrize("is_weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize(
    ("backend", "optimizer"),
    [("cpu", "sgd"), ("cpu", "rowwise_adagrad"), ("fbgemm", "adagrad"), ("fbgemm", ""), ("reference", "adam")],
)
@pytest.mark.parametrize("hashing", HASHINGS)
def test_training_and_answers(hashing: str, backend: str, optimizer: str, is_weighted: bool) -> None:
    if hashing == "evicting" and not optimizer:
        optimizer = "sgd"
    expected = trained(hashing, backend, optimizer, is_weighted, "cpu")
    actual = trained(hashing, backend, optimizer, is_weighted, "meta")
    assert len(actual) == len(expected) >= 20
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        assert tensor.device == CPU
        assert torch.equal(tensor, expected_tensor)


INDEXES = {name: HashIndex(8, config=HashConfig(on_full="evict"), name=name) for name in "tu"}


def batch(number: int = 1, kept_until: int = 2, tables: str = "tu") -> BatchInFlight:
    """A batch that its indexes count as this one."""
    for name in tables:
        INDEXES[name].counts[BATCHES] = number
    return BatchInFlight("ebc", kept_until, [(spec(name), INDEXES[name]) for name in tables])


def spec(name: str) -> TableSpec:
    return TableSpec(name, (name,), (name,), 8, 4, "SUM", INDEXES[name].config, 0.0, 0.0)


def output() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.ones(3, requires_grad=True)
    return weight, weight * 2


def test_a_batch_is_over_when_all_its_lookups_have_run_their_backward() -> None:
    one = batch()
    one.keep({"t": torch.tensor([0])}, training=True)
    (_, first), (_, second), (_, third) = output(), output(), output()
    one.watch([first])
    one.watch([second])
    one.watch([third])
    one.watch([torch.ones(3)])  # nothing to wait for
    third.sum().backward()
    second.sum().backward(retain_graph=True)
    assert one.kept
    second.sum().backward()  # the same one again
    assert one.kept
    assert "t" in one.kept
    first.sum().backward()
    assert not one.kept


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = torch.nn.ModuleDict({"ebc": one_table()})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.sparse["ebc"](features).values()


def test_profiler_ranges_are_node_names() -> None:
    converted = recfx.convert(Model(), hashing=recfx.HashConfig(dense_rows=0))
    batch = one_bag(1, 2)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        converted(batch)
    names = {node.name for node in converted.sparse["ebc"].graph_module.graph.nodes if node.op == "call_module"}
    assert names == {"sparse_ebc_select_features", "sparse_ebc_hash_lookup", "sparse_ebc_keyed_tensor"}
    assert names <= {event.key for event in profiled.key_averages()}


@pytest.mark.parametrize(("backend", "is_fused"), [("cpu", True), ("reference", True), ("cpu", False)])
def test_the_backward_and_the_step_have_the_node_s_name(backend: str, is_fused: bool) -> None:
    """A lookup without an optimizer has a backward alone."""
    model = Model()
    if is_fused:
        attach(model, torch.optim.SGD, lr=0.1)
    converted = recfx.convert(model, backend=backend)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(2):
            converted(one_bag(1, 2)).sum().backward()
    counts = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("sparse_ebc_lookup")}
    ranges = ["", " (backward)", *([" (step)"] if is_fused else [])]
    assert counts == {f"sparse_ebc_lookup{suffix}": 2 for suffix in ranges}


def test_there_are_no_ranges_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    attach(model, torch.optim.SGD, lr=0.1)
    converted = recfx.convert(model)
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: pytest.fail(f"a range {name}"))
    converted(one_bag(1, 2)).sum().backward()
    assert profiler_ranges.running_node() == ""
