"""``torch.compile`` of converted models, and converting compiled ones."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders.batches import batch, raw_batch
from tests.models.handwritten import Tower


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
