"""Tables on the CPU train and answer in the same way whatever torch's default device is, as after
``torch.set_default_device``: tensors are made where the tables and the batch are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import recfx
from tests.builders.collections import table
from tests.builders.optimizers import attach

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
