"""What a trace would lose ends in an opaque leaf with the reason, and the graph stays right around it."""

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.models.sample import tensors_of
from tests.builders.batches import two_bags
from tests.builders.collections import one_table
from tests.support.refusals import refused

BATCH = two_bags(1, 2, 7)
Run = Callable[[Callable[[KeyedJaggedTensor], torch.Tensor], KeyedJaggedTensor], torch.Tensor]


class Hybrid(nn.Module):
    """Holds a collection, and calls it in a way of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.ebc = one_table()
        self.run = run

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.run(self._pool, features)

    def _pool(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values()


class Root(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.hybrid = Hybrid(run)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.hybrid(features) * 2


def number_of_columns(pool: Any, features: Any) -> Any:
    pooled = pool(features)
    return torch.stack([pooled[:, column] for column in range(pooled.shape[1])]).sum(dim=0)


def number_of_keys(pool: Any, features: Any) -> Any:
    return pool(features).view(-1, len(features.keys()), 4).sum(dim=1)


def keys(pool: Any, features: Any) -> Any:
    return sum(features[key].lengths() for key in features.keys()) + pool(features).sum(dim=1)  # noqa: SIM118


def one_key(pool: Any, features: Any) -> Any:
    return pool(features) * (2 if "f" in features.keys() else 3)  # noqa: SIM118


def items(pool: Any, features: Any) -> Any:
    return sum(torch.relu(column) for column in pool(features).unbind(1)) + int(features.keys().index("f"))


def items_of_a_dict(pool: Any, features: Any) -> Any:
    return sum(jagged.lengths() for _, jagged in features.to_dict().items()) + pool(features).sum(dim=1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("run", [number_of_columns, number_of_keys, keys, one_key, items, items_of_a_dict])
def test_what_python_needs_and_no_batch_changes(run: Run, training: bool) -> None:
    """By the root of the model, which cannot be a leaf; another batch of the same form is computed as by Python."""
    model = recfx.convert(Hybrid(run)).train(training)
    graph = recfx.trace(model, (BATCH,))
    assert "recfx_rollbacks" not in graph.meta or graph.meta["recfx_rollbacks"] == []
    assert "ebc_lookup" in {node.name for node in graph.graph.nodes}
    for other in (BATCH, two_bags(0, 5, 5), two_bags(9)):
        assert torch.equal(graph(other), model(other))
        assert torch.equal(pickle.loads(pickle.dumps(graph))(other), model(other))
    if run in (number_of_keys, keys, one_key):
        with refused("wrong_argument", match="was made for", error=recfx.InputError):
            graph(KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])))


def batch_size(pool: Any, features: Any) -> Any:
    return torch.stack([pool(features)[sample] for sample in range(features.stride())])


def longest(pool: Any, features: Any) -> Any:
    return pool(features) + int(features.lengths().max())


def first_id(pool: Any, features: Any) -> Any:
    return pool(features) + torch.zeros(4)[: int(features.lengths()[0].item())].sum()


@pytest.mark.parametrize("run", [batch_size, longest, first_id])
def test_what_batches_change_is_refused_by_its_line(run: Run) -> None:
    model = recfx.convert(Hybrid(run))
    with refused("untraceable_root", match=f"{Path(__file__).name}:{run.__code__.co_firstlineno + 1}"):
        recfx.trace(model, (BATCH,))
    with refused("untraceable_root"):
        recfx.convert(Hybrid(run), (BATCH,), whole_graph=True)


class Divides(nn.Module):
    """Branches on values, so that no trace enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.divisor = 1

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        divided = pooled / self.divisor
        return divided if bool((divided < 1e9).all()) else divided * 2


class AssignsToLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.leaf = one_table(), Divides()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features).values()
        self.leaf.divisor = pooled.size(0)
        return self.leaf(pooled)


def test_what_a_leaf_reads_and_the_code_around_it_assigns_is_not_traced(tmp_path: Path) -> None:
    """The trace waited for itself when the leaf was run to observe it."""
    with refused("untraceable_root", match="attribute"):
        recfx.convert(AssignsToLeaf(), (BATCH,), whole_graph=True)
    with refused("not_scriptable", match="attribute", error=recfx.ExportError):
        recfx.export(recfx.convert(AssignsToLeaf()).eval(), tmp_path / "model", (BATCH,))


def inside(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Run:
    def run(pool: Callable[[KeyedJaggedTensor], torch.Tensor], features: KeyedJaggedTensor) -> torch.Tensor:
        with context():
            return pool(features)

    return run


def checkpointed(use_reentrant: bool) -> Run:
    return lambda pool, features: torch.utils.checkpoint.checkpoint(pool, features, use_reentrant=use_reentrant)


def hooked() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("run", "name"),
    [
        (inside(torch.enable_grad), "torch.enable_grad"),
        (inside(torch.no_grad), "torch.no_grad"),
        (inside(torch.inference_mode), "torch.inference_mode"),
        (inside(lambda: torch.set_grad_enabled(False)), "torch.set_grad_enabled"),
        (inside(lambda: torch.autocast("cpu", torch.bfloat16)), "torch.autocast"),
        (inside(hooked), "saved_tensors_hooks"),
        (checkpointed(use_reentrant=False), "activation checkpointing"),
        (checkpointed(use_reentrant=True), "activation checkpointing"),
    ],
    ids=["enable_grad", "no_grad", "inference_mode", "set_grad", "autocast", "hooks", "checkpoint", "reentrant"],
)
def test_what_a_graph_would_forget_stays_a_call(run: Run, name: str) -> None:
    model, own = Root(run), two_bags(1, 2, 7)  # TorchRec keeps jagged tensors in it, also of inference mode
    traced = recfx.trace(model, (own,))
    ((path, reason, message),) = [
        (rollback.path, rollback.code, rollback.message) for rollback in traced.meta["recfx_rollbacks"]
    ]
    assert (path, reason) == ("hybrid", "lost_by_tracing")
    assert message.startswith(f"LostByTracing: {name} would be missing from the graph (at {__file__}:")
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_module"] == ["hybrid"]
    output, expected = traced(own), model(own)
    assert torch.equal(output, expected)
    assert output.requires_grad == expected.requires_grad


class Scaled(nn.Module):
    """Uses its parameter, then what no trace can follow."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.ebc = one_table()
        self.scale = scale

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features).values() * self.scale
        return pooled if pooled.sum() > 1e9 else -pooled


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.inner = Scaled(self.scale)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.inner(features) * self.scale


def test_a_parameter_first_used_where_the_trace_gives_up() -> None:
    model = Tied()
    traced = recfx.trace(model, (BATCH,))
    assert [(one.path, one.code) for one in traced.meta["recfx_rollbacks"]] == [("inner", "untraceable")]
    traced.graph.lint()
    expected, output = model(BATCH), traced(BATCH)
    assert torch.equal(output, expected)
    expected.sum().backward()
    gradient = model.scale.grad.clone()
    model.zero_grad()
    output.sum().backward()
    torch.testing.assert_close(model.scale.grad, gradient, rtol=1e-6, atol=0)


class Between(nn.Module):
    """Can be traced, but holds two modules of which the first cannot; what it passes is not computed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        self.first = Branches()
        self.second = Hybrid(inside(contextlib.nullcontext))

    def forward(self, features: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        pooled = self.first(features, [dense.T], scale={"scale": self.scale.T})
        return pooled + self.second(features) * dense.T.sum()


class Branches(nn.Module):
    """Uses what it gets, and then what no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()

    def forward(
        self, features: KeyedJaggedTensor, dense: list[torch.Tensor], *, scale: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        pooled = self.ebc(features).values() @ scale["scale"] * dense[0].sum()
        return pooled if pooled.sum() > 1e9 else -pooled


class Outermost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.between = Between()

    def forward(self, features: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        return self.between(features, dense) * 2


def test_only_the_inner_module_that_cannot_be_traced_stays_a_call() -> None:
    model, sample = Outermost(), (BATCH, torch.rand(3, 2))
    traced = recfx.trace(model, sample)
    assert [(one.path, one.code) for one in traced.meta["recfx_rollbacks"]] == [("between.first", "untraceable")]
    called = {str(node.target).split(".graph_module")[0] for node in traced.graph.find_nodes(op="call_module")}
    assert called == {"between.first", "between.second.ebc"}
    traced.graph.lint()
    assert torch.equal(traced(*sample), model(*sample))


def test_other_threads_run_models_meanwhile_and_do_what_a_graph_would_forget() -> None:
    contexts = [lambda: torch.autocast("cpu", torch.bfloat16), torch.enable_grad, torch.inference_mode, torch.no_grad]
    outputs: list[object] = []

    def run_elsewhere() -> None:
        model = nn.Sequential(nn.Linear(1, 1))
        try:
            for context in [*contexts, hooked]:
                with context():
                    output = model(torch.ones(1))
                outputs.append((output.dtype, output.requires_grad, output.is_inference()))
        except Exception as error:  # whatever a patched call raises
            outputs.append(error)

    def run(pool: Callable[[KeyedJaggedTensor], torch.Tensor], features: KeyedJaggedTensor) -> torch.Tensor:
        other = threading.Thread(target=run_elsewhere)
        other.start()
        other.join(60)
        assert not other.is_alive()
        return pool(features)

    run_elsewhere()
    expected, running = outputs.copy(), threading.active_count()
    traced = recfx.trace(Root(run), (BATCH,))
    assert threading.active_count() == running  # those that computed values have ended
    assert traced.meta["recfx_rollbacks"] == []
    assert outputs == expected * (len(outputs) // 5)
    assert len(outputs) > 5


@dataclass
class Extra:
    mask: torch.Tensor
    features: KeyedJaggedTensor


def full_sample() -> recfx.Sample:
    weighted = KeyedJaggedTensor(
        ["f"], torch.tensor([1, 2, 7]), torch.rand(3).requires_grad_(), lengths=torch.tensor([2, 1])
    )
    by_offsets = KeyedJaggedTensor.from_offsets_sync(["f"], torch.tensor([4, 5, 6]), torch.tensor([0, 1, 3]))
    return recfx.Sample(
        torch.rand(2, 3).requires_grad_(),
        [weighted, (torch.arange(2),)],
        other={"features": by_offsets, "scalar": torch.tensor(5.0), "fixed": torch.rand(7)},
        extra=Extra(torch.tensor([True, False]), BATCH),
        flag=True,
    )


def test_a_cloned_sample_shares_no_tensor() -> None:
    sample = full_sample()
    ours, theirs = (tensors_of((one.args, one.kwargs)) for one in (sample, sample.clone()))
    assert len(ours) == len(theirs) == 12
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert (other.requires_grad, other.is_leaf) == (one.requires_grad, True)
    pointers = [{tensor.untyped_storage().data_ptr() for tensor in tensors} for tensors in (ours, theirs)]
    assert pointers[0].isdisjoint(pointers[1])
    first, second = (one.kwargs["other"]["features"].offsets() for one in (sample, sample.clone()))
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_a_resized_sample_has_the_first_one_again() -> None:
    sample = full_sample()
    resized = sample.resized()
    assert resized is not None
    ours, theirs = (tensors_of((one.args, one.kwargs)) for one in (sample, resized))
    ids, samples, others = [0, 1, 2, 0, 1], [0, 1, 0], slice(None)
    taken = [samples, ids, samples, ids, samples, [0, 1, 2, 0], samples, others, others, samples, ids, samples]
    for one, other, take in zip(ours, theirs, taken, strict=True):
        assert torch.equal(one if one.dim() == 0 else one[take], other)
        assert other.requires_grad == one.requires_grad
    assert resized.kwargs["flag"] is True


def test_a_module_whose_graph_differs_stays_a_call() -> None:
    """It draws a number that a trace would keep for ever."""
    model = Root(lambda pool, features: pool(features) * torch.rand(1))
    traced = recfx.trace(model, (BATCH,))
    (rollback,) = traced.meta["recfx_rollbacks"]
    assert (rollback.path, rollback.code) == ("hybrid", "graph_differs")
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_module"] == ["hybrid"]
    for seed in range(2):
        torch.manual_seed(seed)
        expected = model(BATCH)
        torch.manual_seed(seed)
        assert torch.equal(traced(BATCH), expected)


class MakesTensors(nn.Module):
    """Adds tensors of its own, and calls a collection whose output it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()
        self.other = one_table()
        self.mask = torch.ones(1)

    def forward(self, *batch: KeyedJaggedTensor) -> torch.Tensor:
        (features,) = batch
        self.other(features)
        pooled = self.ebc(features).values()
        return pooled * self.mask + torch.arange(1)


def test_constants_of_the_code_are_no_state_of_the_graph() -> None:
    model = recfx.convert(MakesTensors())
    for graph in (recfx.trace(model, (BATCH,)), recfx.convert(model, (BATCH,), whole_graph=True)):
        assert torch.equal(graph(BATCH), model(BATCH))
        assert list(graph.state_dict()) == list(model.state_dict())


def test_a_collection_whose_output_nothing_uses_stays_a_call() -> None:
    names = [node.name for node in recfx.trace(MakesTensors(), (BATCH,)).graph.nodes if node.op == "call_module"]
    assert names == ["other", "ebc_select_features", "ebc_lookup", "ebc_keyed_tensor"]


class Penalised(Root):
    """Adds what ``penalty`` computes from all parameters."""

    penalty: Callable[[torch.Tensor], Any]

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return super().forward(features) + sum(type(self).penalty(weight) for weight in self.parameters())


@pytest.mark.parametrize(
    "penalty",
    [
        torch.norm,
        lambda weight: weight.detach().norm(),
        lambda weight: weight.norm().item(),
        lambda weight: float(weight.norm()),
        lambda weight: 1 if weight.norm() > 1 else 0,
    ],
)
def test_what_is_computed_from_parameters_is_no_constant(
    penalty: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalised, "penalty", staticmethod(penalty), raising=False)
    with pytest.raises(recfx.ConversionError, match="computes from parameters"):
        recfx.trace(Penalised(lambda pool, features: pool(features)), (BATCH,))


class Counts(nn.Module):
    """Counts its calls in a buffer, in place or by a new one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.ebc = one_table()
        self.in_place = in_place
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.in_place:
            self.steps += 1
        else:
            self.steps = self.steps + 1
        return self.ebc(features).values() * self.steps


def test_a_graph_counts_in_a_buffer_of_the_model() -> None:
    model = recfx.convert(Counts(in_place=True))
    graph = recfx.trace(model, (BATCH,))
    assert torch.equal(graph(BATCH) * 2, model(BATCH))
    assert model.steps == graph.steps == 2


def test_a_buffer_that_a_graph_would_not_replace_is_named() -> None:
    with pytest.raises(recfx.ConversionError, match="buffer steps, which the code assigns"):
        recfx.trace(Counts(in_place=False), (BATCH,))


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()

    def forward(self, features: KeyedJaggedTensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
        pooled = self.ebc(features).values()
        return pooled if temperature is None else pooled / temperature


@pytest.mark.parametrize("whole_graph", [False, True])
def test_a_graph_with_an_argument_of_none_survives_pickling_and_takes_no_other(whole_graph: bool) -> None:
    model = recfx.convert(Tempered())
    graph = recfx.convert(model, (BATCH,), whole_graph=True) if whole_graph else recfx.trace(model, (BATCH,))
    for duplicate in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert torch.equal(duplicate(BATCH), model(BATCH))
        with refused("wrong_argument", error=recfx.InputError, match="temperature is"):
            duplicate(BATCH, torch.ones(1))


def test_a_graph_with_a_constant_argument_takes_no_other() -> None:
    class WithoutLabels(Tempered):
        def forward(self, features: KeyedJaggedTensor, scale: float = 2.0) -> torch.Tensor:
            return self.ebc(features).values() * scale

    graph = recfx.convert(WithoutLabels(), (BATCH,), whole_graph=True)
    for duplicate in (graph, copy.deepcopy(graph)):
        assert torch.equal(duplicate(BATCH, 2.0), duplicate(BATCH))
        for other in (3.0, torch.ones(2)):
            with refused("wrong_argument", error=recfx.InputError, match="scale is"):
                duplicate(BATCH, other)


def test_a_graph_is_neither_unconverted_nor_exported(tmp_path: Path) -> None:
    graph = recfx.trace(Tempered(), (BATCH,))
    for traced in (graph, recfx.trace(one_table(), (BATCH,)), torch.compile(graph)):
        with refused("traced_graph", match="pass the model"):
            recfx.unconvert(traced)
    with refused("traced_graph", error=recfx.ExportError):
        recfx.export(graph, tmp_path / "model.pt", (BATCH,))
