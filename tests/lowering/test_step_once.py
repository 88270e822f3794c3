"""A fused optimizer steps when an optimizer in backward does: once per backward pass, with a table's whole gradient."""

import copy
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import recfx
from recfx.lowering.step.step_once import Trigger, _Left
from recfx.optim.fused_optimizer import FusedOptimizer
from tests.builders.optimizers import OPTIMIZERS, attach

ROWS, DIM = 12, 4
KEYS = ["f0", "g0", "f1", "f2"]


def collection(is_weighted: bool = False) -> EmbeddingBagCollection:
    """``t0`` has two features; ``t1`` is pooled by mean where that is allowed."""
    mean = PoolingType.SUM if is_weighted else PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(name="t0", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f0", "g0"]),
        EmbeddingBagConfig(name="t1", num_embeddings=ROWS, embedding_dim=2 * DIM, feature_names=["f1"], pooling=mean),
        EmbeddingBagConfig(name="t2", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f2"]),
    ]
    return EmbeddingBagCollection(tables, is_weighted=is_weighted)


def batch(size: int, seed: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    """Every row of every table, and bags of other ids; the first bag of each feature is empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS), size), generator=generator)
    lengths[:, 0] = 0
    lengths[:, -1] = ROWS
    values = []
    for feature in lengths:
        others = torch.randint(0, ROWS, (int(feature.sum()) - ROWS,), generator=generator)
        values.append(torch.cat([others, torch.arange(ROWS)]))
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator).requires_grad_() if weighted else None
    return KeyedJaggedTensor(KEYS, ids, weights, lengths=lengths.view(-1))


def loss(values: torch.Tensor) -> torch.Tensor:
    return (values - torch.linspace(-1, 2, values.numel()).view_as(values)).square().mean()


Step = Callable[[nn.Module, int], None]


def pair(optimizer: str, build: Callable[[], nn.Module], backend: str = "auto") -> tuple[nn.Module, nn.Module]:
    """The same model twice, the second one converted, without a sample."""
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        attach(one, optimizer)
    return plain, recfx.convert(model, backend=backend)


def assert_fused(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, recfx.HashEmbeddingBagCollection):
            assert module.fused_optimizers().keys() == {table.name for table in module.tables}


def assert_same(plain: nn.Module, converted: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in converted.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def check(optimizer: str, step: Step, *, build: Any = collection, backend: str = "auto", steps: int = 4) -> None:
    plain, converted = pair(optimizer, build, backend)
    assert_fused(converted)
    step_both(plain, converted, step, steps)
    if step is twice:
        assert {float(one.state.get("step", steps)) for one in converted.fused_optimizers().values()} == {steps}


def step_both(plain: nn.Module, converted: nn.Module, step: Step, steps: int = 3) -> None:
    for number in range(steps):
        step(plain, number)
        step(converted, number)
        assert_same(plain, converted)


def twice(model: nn.Module, number: int) -> None:
    first, second = (model(batch(size, 10 * number + size)).values() for size in (3, 5))
    (loss(first) + 3 * loss(second)).backward()


def a_number_that_varies(model: nn.Module, number: int) -> None:
    pooled = [model(batch(3, 10 * number + call)).values() for call in range((number * 2) % 3 + 1)]
    sum((loss(output) for output in pooled), torch.zeros(())).backward()


def one_is_never_used(model: nn.Module, number: int) -> None:
    used, _ = (model(batch(4, 10 * number + call)).values() for call in range(2))
    loss(used).backward()


def two_graphs_in_turn(model: nn.Module, number: int) -> None:
    for call in range(2):
        loss(model(batch(3, 10 * number + call)).values()).backward()


def two_graphs_at_once(model: nn.Module, number: int) -> None:
    losses = [loss(model(batch(3, 10 * number + call)).values()) for call in range(2)]
    for loss_of_call in losses:
        loss_of_call.backward()


def two_backwards_of_one_graph(model: nn.Module, number: int) -> None:
    total = loss(model(batch(3, number)).values()) + loss(model(batch(4, number + 100)).values())
    total.backward(retain_graph=True)
    total.backward()


def others_between(model: nn.Module, number: int) -> None:
    first = model(batch(3, number)).values()
    with torch.no_grad():
        model(batch(5, number + 50))
    model.eval()
    second = model(batch(2, number + 100)).values()
    model.train()
    (loss(first) + loss(second)).backward()


def a_gradient_of_something_else_first(model: nn.Module, number: int) -> None:
    scale = torch.ones((), requires_grad=True)
    total = scale * (loss(model(batch(3, number)).values()) + loss(model(batch(3, number + 9)).values()))
    torch.autograd.grad(total, scale, retain_graph=True)
    total.backward()


def a_backward_that_wants_other_inputs_first(model: nn.Module, number: int) -> None:
    scale = torch.ones((), requires_grad=True)
    total = scale * (loss(model(batch(3, number)).values()) + loss(model(batch(3, number + 9)).values()))
    total.backward(inputs=[scale], retain_graph=True)
    total.backward()


def checkpointed(use_reentrant: bool) -> Step:
    def step(model: nn.Module, number: int) -> None:
        started = torch.zeros(1, requires_grad=True)

        def pooled(start: torch.Tensor) -> torch.Tensor:
            return model(batch(3, number)).values() + start

        replayed = checkpoint(pooled, started, use_reentrant=use_reentrant)
        (loss(replayed) + loss(model(batch(4, number + 100)).values())).backward()

    return step


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        twice, a_number_that_varies, one_is_never_used, two_graphs_in_turn, two_graphs_at_once,
        two_backwards_of_one_graph, others_between, a_gradient_of_something_else_first,
        a_backward_that_wants_other_inputs_first,
    )
} | {"checkpointed": checkpointed(False), "checkpointed_reentrant": checkpointed(True)}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_collection_that_is_called_more_than_once(optimizer: str, step: str) -> None:
    check(optimizer, STEPS[step])


BACKENDS = ["cpu", "fbgemm", "reference"]
if os.environ.get("TRITON_INTERPRET") == "1":  # tests/ascend runs this file so
    BACKENDS.append("triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_every_backend_sums_what_all_calls_give(optimizer: str, backend: str) -> None:
    check(optimizer, twice, backend=backend, steps=2)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_weights_of_the_batch_get_their_gradients_before_any_step(optimizer: str) -> None:
    plain, converted = pair(optimizer, lambda: collection(is_weighted=True))
    for number in range(3):
        gradients = []
        for model in (plain, converted):
            batches = [batch(size, 10 * number + size, weighted=True) for size in (3, 5)]
            pooled = [model(features).values() for features in batches]
            (loss(pooled[0]) + loss(pooled[1])).backward()
            gradients.append([features.weights().grad for features in batches])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
        assert_same(plain, converted)


class Stop(Exception):
    pass


def test_what_a_failed_backward_left_is_forgotten() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise Stop

    plain, converted = pair("adagrad", collection)
    for model in (plain, converted):
        later = model(batch(3, 1)).values()
        other = model(batch(3, 2)).values()
        other.register_hook(fail)
        with pytest.raises(Stop):
            (loss(later) + loss(other)).backward()
        del later, other
        twice(model, 3)
    assert_same(plain, converted)


def test_passes_that_only_want_other_gradients_do_not_pile_up() -> None:
    """Nothing tells that such a pass has ended; what it left is forgotten, and what a running one left is not."""
    plain, converted = pair("adagrad", lambda: collection(is_weighted=True))
    features = batch(3, 1, weighted=True)
    kept = []
    for number in range(60):
        values = converted(features).values()
        torch.autograd.grad(loss(values), features.weights(), retain_graph=number < 20)
        if number < 20:
            kept.append(values)
    own = [one for one in gc.get_objects() if type(one) is Trigger and one.leaf.grad_fn is None]
    mine = [trigger for trigger in own if any(one.waiting for one in trigger._passes.values())]
    assert mine
    assert max(len(one._passes) for one in mine) <= 20 + 17
    for model in (plain, converted):
        loss(model(batch(3, 2, weighted=True)).values()).backward()
    assert_same(plain, converted)
    del kept


class Towers(nn.Module):
    """Two collections whose tables ``t0`` and ``t2`` are the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = collection(), collection()
        for table in ("t0", "t2"):
            self.item.embedding_bags[table].weight = self.user.embedding_bags[table].weight

    def forward(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> torch.Tensor:
        return loss(self.user(user).values()) + 2 * loss(self.item(item).values())


def both_towers(model: nn.Module, number: int) -> None:
    model(batch(3, number), batch(5, number + 100)).backward()


def one_tower_then_both(model: nn.Module, number: int) -> None:
    towers: Any = model
    loss(towers.item(batch(3, number)).values()).backward()
    both_towers(model, number + 7)
    (loss(towers.user(batch(4, number)).values()) + towers(batch(3, 1), batch(3, 2))).backward()


class Same(nn.Module):
    """One collection with one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.ebc.embedding_bags["t2"].weight = self.ebc.embedding_bags["t0"].weight

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return loss(self.ebc(features).values())


class Mixed(nn.Module):
    """Collections that read the same weights: means, sums, sums with weights of ids, and rows that are not pooled."""

    def __init__(self, with_rows: bool = True) -> None:
        super().__init__()
        self.means, self.weighted = collection(), collection(is_weighted=True)
        sums = [replace(config, pooling=PoolingType.SUM) for config in self.means.embedding_bag_configs()]
        self.sums = EmbeddingBagCollection(sums)
        for other in (self.sums, self.weighted):
            for table, bag in self.means.embedding_bags.items():
                other.embedding_bags[table].weight = bag.weight
        self.rows = nn.ModuleList(map(self._sequences, (["t2", "t0"], ["t1"]))) if with_rows else []

    def _sequences(self, tables: list[str]) -> EmbeddingCollection:
        weights = {table: self.means.embedding_bags[table].weight for table in tables}
        configs = [
            EmbeddingConfig(name=table, num_embeddings=ROWS, embedding_dim=weight.shape[1], feature_names=["f0", "f2"])
            for table, weight in weights.items()
        ]
        rows = EmbeddingCollection(configs)
        for table, weight in weights.items():
            rows.embeddings[table].weight = weight
        return rows

    def forward(self, sizes: tuple[int, int, int], number: int) -> torch.Tensor:
        unweighted = self.means(batch(sizes[0], number)), self.sums(batch(sizes[1], number + 1))
        weighted = self.weighted(batch(sizes[2], number + 2, weighted=True))
        unused = 2 * (number % 2)  # keys of the first table
        sequences = [row for rows in self.rows for row in list(rows(batch(sizes[2], number + 3)).values())[unused:]]
        return sum((loss(output.values()) for output in (*unweighted, weighted, *sequences)), torch.zeros(()))


@pytest.fixture
def _only_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a weight was stepped in ATen")

    monkeypatch.setattr(FusedOptimizer, "step", refuse)


@pytest.mark.usefixtures("_only_in_cpp")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("with_rows", [False, True])
def test_target_cpu_steps_shared_weights_in_cpp(optimizer: str, with_rows: bool) -> None:
    """Means, sums and weighted sums of the same rows, in batches of different sizes, and with a table frozen."""

    def step(model: nn.Module, number: int) -> None:
        model.get_parameter("means.embedding_bags.t0.weight").requires_grad_(number != 1)
        model((3, 4, 6), 10 * number).backward()
        model((2, 2, 2), 10 * number + 5).backward()

    check(optimizer, step, build=lambda: Mixed(with_rows))
    for towers in (both_towers, one_tower_then_both):
        check(optimizer, towers, build=Towers)
    check(optimizer, lambda model, number: model(batch(4, number)).backward(), build=Same)


class Tied(nn.Module):
    """``t0`` is read by other layers, too: ``before`` and ``after`` the lookup, in the order of the forward."""

    def __init__(self, *readers: str) -> None:
        super().__init__()
        self.readers, self.ebc = readers, collection()
        self.register_buffer("mixing", torch.linspace(-1, 1, 5 * DIM * DIM).sin().view(5 * DIM, DIM))
        if "rows" in readers:
            config = EmbeddingConfig(name="t0", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f2"])
            self.rows = EmbeddingCollection([config])
            self.rows.embeddings["t0"].weight = self.weight
        self.sparse = nn.EmbeddingBag(ROWS, DIM, sparse=True, _weight=self.weight)
        self.sparse.weight = self.weight

    @property
    def weight(self) -> nn.Parameter:
        weight = self.ebc.embedding_bags["t0"].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def forward(self, features: KeyedJaggedTensor, number: int) -> torch.Tensor:
        total = torch.zeros(())
        if "before" in self.readers:
            total = loss(torch.linspace(-1, 1, DIM) @ self.weight.T)
        hidden = self.ebc(features).values() @ self.mixing if "lookup" in self.readers else torch.ones(2, DIM)
        if "lookup" in self.readers:
            total = total + loss(hidden)
        if "rows" in self.readers:
            total = total + loss(self.rows(features)["f2"].values())
        if "sparse" in self.readers:
            total = total + loss(self.sparse(torch.tensor([[number, 3, 3]]))) + loss(self.sparse(torch.tensor([[1]])))
        if "after" in self.readers:
            total = total + loss(hidden @ self.weight.T)
        return total


READERS = [
    ("before", "lookup"), ("lookup", "after"), ("before", "lookup", "after"), ("lookup", "rows"),
    ("lookup", "rows", "after"),
]  # fmt: skip


def tied(*readers: str) -> Callable[[], nn.Module]:
    return lambda: Tied(*readers)


def one_step(model: nn.Module, number: int) -> None:
    model(batch(3, number), number).backward()


def lookups_and_readers_in_turn(model: nn.Module, number: int) -> None:
    """Passes with both, with either alone, and with both in one again."""
    whole: Any = model
    readers = whole.readers
    for part in (readers, ["lookup"], [reader for reader in readers if reader != "lookup"], readers):
        whole.readers = part
        one_step(model, number)
    whole.readers = readers


def twice_in_a_pass(model: nn.Module, number: int) -> None:
    (model(batch(3, number), number) + 2 * model(batch(4, number + 50), number)).backward()


def reentrant(model: nn.Module, number: int) -> None:
    """The lookup and a reader inside a pass of their own, and again in the pass around it."""
    start = torch.zeros(1, requires_grad=True)
    inner = checkpoint(lambda begun: model(batch(3, number), number) + begun, start, use_reentrant=True)
    (inner.sum() + model(batch(4, number + 50), number)).backward()


JOINED_STEPS = (reentrant, lookups_and_readers_in_turn, twice_in_a_pass, one_step)
# In an interpreter, which takes seconds for each, the readers of a weight meet one of the steps, and each step some.
JOINED = [
    pytest.param(readers, step, backend, id=f"{'-'.join(readers)}-{step.__name__}-{backend}")
    for number, readers in enumerate(READERS)
    for step in JOINED_STEPS
    for backend in BACKENDS
    if backend != "triton" or step is JOINED_STEPS[number % len(JOINED_STEPS)]
]


@pytest.mark.parametrize(("readers", "step", "backend"), JOINED)
def test_what_else_reads_a_weight_joins_its_step(readers: tuple[str, ...], step: Step, backend: str) -> None:
    """Dense Adagrad steps no row without a gradient, so that the two must agree in all rows."""
    if "rows" in readers and backend == "fbgemm":
        pytest.skip("it pools all rows")
    check("adagrad", step, build=tied(*readers), backend=backend, steps=3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_steps_once_with_what_else_reads_the_weight(optimizer: str) -> None:
    check(optimizer, one_step, build=tied("before", "lookup", "after"))


@pytest.mark.parametrize("readers", READERS, ids="-".join)
def test_copies_join_what_else_reads_a_weight(readers: tuple[str, ...]) -> None:
    """Copying a parameter loses the optimizer that torch has attached; the copied collection keeps its form of it."""
    plain, converted = pair("adagrad", tied(*readers))
    step_both(plain, copy.deepcopy(converted), lookups_and_readers_in_turn)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_sparse_gradient_joins_the_step(optimizer: str) -> None:
    check(optimizer, one_step, build=tied("lookup", "sparse"), steps=3)


def test_a_reader_that_gives_no_gradient_does_not_hold_up_the_step() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> None:
            return None

    def step(model: nn.Module, number: int) -> None:
        tied: Any = model
        read = Nothing.apply(tied.weight)  # its backward comes after that of the lookup
        (read + model(batch(3, number), number)).backward()

    check("adagrad", step, build=tied("lookup"))


def test_a_failed_backward_leaves_no_step_of_a_tied_weight_behind() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise Stop

    plain, converted = pair("adagrad", tied("lookup", "after"))
    for model in (plain, converted):
        whole: Any = model
        hidden = whole.ebc(batch(3, 0)).values() @ whole.mixing
        hidden.register_hook(fail)  # the weight's gradient from the product has arrived by then
        with pytest.raises(Stop):
            loss(hidden @ whole.weight.T).backward()
    step_both(plain, converted, one_step)


@pytest.mark.parametrize("readers", [[], ["before"], ["after"]], ids="-".join)
def test_a_graph_that_is_kept_keeps_no_batch_of_a_step_that_was_taken(readers: list[str]) -> None:
    """Whichever comes first in the backward, the lookup or what else reads the weight."""
    _, converted = pair("adagrad", tied("lookup"))
    model: Any = converted
    gc.collect()
    others, notes = left_parts(), left_notes()
    kept = [model.weight.sum() for reader in readers if reader == "before"]
    kept += [model.ebc(batch(3, 1)).values().sum()]
    kept += [model.weight.sum() for reader in readers if reader == "after"]
    for _ in range(3):
        torch.autograd.backward(kept, retain_graph=True)
    gc.collect()
    assert left_parts() == others
    assert left_notes() <= notes + 2  # one for each of the two lookups
    assert all(output.grad_fn is not None for output in kept)


def left_notes() -> int:
    return sum(type(one) is _Left for one in gc.get_objects())


def left_parts() -> int:
    """How many parts are waiting, or were not freed."""
    return sum(type(one) is _Left and one.part is not None for one in gc.get_objects())


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_compiled_autograd(optimizer: str, backend: str) -> None:
    """It hands the backward of a node another context than its own, for the call alone."""
    plain, converted = pair(optimizer, collection, backend)
    for number in range(2):
        twice(plain, number)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            twice(converted, number)
        assert_same(plain, converted)


def test_a_graph_that_saved_a_weight_is_refused_once_the_weight_has_stepped() -> None:
    """As by torch, whose optimizers in backward change the weight that the output layer has saved."""
    for model in pair("adagrad", tied("lookup", "after")):
        value = model(batch(3, 1), 1)
        value.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()
