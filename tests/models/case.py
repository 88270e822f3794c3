"""What the zoo knows of a model, and how two models are compared on it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import standard_kind
from recfx.models.sample import Sample

BATCH_SIZES = (4, 7)


@dataclass(frozen=True)
class Case:
    """A model of the zoo.

    Args:
        name: test id.
        build: makes the model; random numbers from torch's generator, so that one seed makes one model.
        call: makes one call of the model for a batch size, from torch's generator as well.
        whole_graph: reason code with which ``whole_graph=True`` is refused; empty where it has to agree.
        skip_gradients: parameters whose gradient upstream leaves uninitialised.
        rtol: of outputs and gradients.
        atol: of outputs and gradients.
        around: a context in which the test runs.
    """

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[int], Sample]
    whole_graph: str = ""
    skip_gradients: tuple[str, ...] = ()
    rtol: float = 1e-5
    atol: float = 1e-6
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def model(self) -> nn.Module:
        """A new model, the same weights every time."""
        torch.manual_seed(1)
        return self.build()

    def sample(self, batch_size: int = BATCH_SIZES[0]) -> Sample:
        """A new call, the same numbers every time for one batch size."""
        torch.manual_seed(100 + batch_size)
        return self.call(batch_size)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a model's output, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, KeyedTensor):
        yield value.values()
    elif isinstance(value, (KeyedJaggedTensor, JaggedTensor)):
        weights = value.weights_or_none()
        yield from (value.values(), value.lengths(), *(() if weights is None else (weights,)))
    elif isinstance(value, (dict, TensorDict)):
        for key in sorted(value.keys()):
            yield from tensors_in(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def run(model: nn.Module, call: Sample, *, backward: bool) -> list[torch.Tensor]:
    """One forward from a fixed seed, and one backward through every output that has one; gradients start from zero."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    outputs = list(tensors_in(model(*call.args, **call.kwargs)))
    assert outputs, "the case compares nothing"
    differentiable = [output for output in outputs if output.requires_grad]
    if backward and differentiable:
        torch.manual_seed(3)
        torch.autograd.backward([(output * torch.rand_like(output)).sum() for output in differentiable])
    return outputs


def assert_agree(reference: nn.Module, converted: nn.Module, case: Case) -> None:
    """Outputs, their dtypes and the gradients of every parameter, in train and eval, at two batch sizes."""
    wanted_names = [name for name, _ in reference.named_parameters()]
    assert [name for name, _ in converted.named_parameters()] == wanted_names
    for training in (True, False):
        reference.train(training)
        converted.train(training)
        for batch_size in BATCH_SIZES:
            expected = run(reference, case.sample(batch_size), backward=True)
            actual = run(converted, case.sample(batch_size), backward=True)
            where = f"{case.name}, {'train' if training else 'eval'}, batch size {batch_size}"
            _assert_close(expected, actual, case, where)
            _assert_same_gradients(reference, converted, case, where)


def _assert_close(expected: list[torch.Tensor], actual: list[torch.Tensor], case: Case, where: str) -> None:
    assert len(actual) == len(expected), where
    for position, (before, after) in enumerate(zip(expected, actual, strict=True)):
        assert after.requires_grad == before.requires_grad, f"{where}, output {position}"
        torch.testing.assert_close(
            after, before, rtol=case.rtol, atol=case.atol, msg=lambda m, p=position: f"{where}, output {p}: {m}"
        )


def _assert_same_gradients(reference: nn.Module, converted: nn.Module, case: Case, where: str) -> None:
    parameters = dict(converted.named_parameters())
    for name, parameter in reference.named_parameters():
        if name in case.skip_gradients:
            continue
        expected, gradient = parameter.grad, parameters[name].grad
        # A table of which no id came may have a gradient of zeros, or none.
        if expected is None or gradient is None:
            assert expected is None or not expected.any(), f"{where}: {name} has no gradient"
            assert gradient is None or not gradient.any(), f"{where}: {name} has a gradient"
            continue
        torch.testing.assert_close(
            gradient, expected, rtol=case.rtol, atol=case.atol, msg=lambda m, n=name: f"{where}, gradient of {n}: {m}"
        )


def standard_collections(model: nn.Module) -> list[nn.Module]:
    """The collections of ``model`` that still are TorchRec's, and have tables."""
    standard = [module for module in model.modules() if not isinstance(module, ConvertedCollection)]
    return [module for module in standard if (kind := standard_kind(module)) and kind.configs_of(module)]
