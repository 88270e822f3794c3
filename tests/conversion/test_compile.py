"""``torch.compile`` of converted models, and converting compiled ones."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders.batches import batch, raw_batch
from tests.models.handwritten import Tower
from tests.optim.fused_pairs import fused_pair, train
from tests.support.needs import needs


@pytest.mark.parametrize(
    ("backend", "hashing"),
    [("eager", HashConfig()), ("eager", HashConfig(dense_rows=0)), ("inductor", HashConfig())],
    ids=["eager-dense", "eager-hashed", "inductor-dense"],
)
def test_compiling_the_converted_model(backend: str, hashing: HashConfig) -> None:
    torch._dynamo.reset()
    model = Tower()
    converted = convert(model, hashing=hashing)
    converted(batch(4))
    # With dynamic shapes from the beginning, the slow compiler compiles once.
    compiled = torch.compile(converted, backend=backend, dynamic=True if backend == "inductor" else None)
    for batch_size in (4, 6):
        features = batch(batch_size)
        outputs, gradients = [], []
        for one in (converted, compiled):
            one.zero_grad()
            output = one(features)
            output.square().sum().backward()
            outputs.append(output.detach())
            gradients.append([parameter.grad.clone() for parameter in one.parameters()])
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


@needs("reason" in inspect.signature(torch.compiler.disable).parameters, "torch 2.9, which shows the reason")
def test_a_collection_inside_one_full_graph_says_that_it_is_a_break() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(convert(Tower()), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the model without fullgraph=True"):
        compiled(batch(4))


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_compiling_a_fused_model(kind: str) -> None:
    torch._dynamo.reset()
    plain, converted = fused_pair(kind, "auto", "two_tables")
    compiled = torch.compile(converted, backend="eager")
    for _ in range(3):
        features = batch(6)
        train(plain, features)
        train(compiled, features)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_compiled_model_is_really_converted(how: str, inplace: bool) -> None:
    """Compiled and run before: what was compiled is the original's code."""
    torch._dynamo.reset()
    model: nn.Module = Tower()
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    model(batch(4))
    converted = convert(model, hashing=HashConfig(dense_rows=0), inplace=inplace)
    assert converted(raw_batch()).shape == (1, 4)
    if not inplace:
        with pytest.raises((IndexError, RuntimeError)):
            model(raw_batch())
