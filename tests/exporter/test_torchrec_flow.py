"""TorchRec's own flow to a server, on an unconverted model: quantize, shard, trace, script, save, load.

Annotations are not postponed here: TorchScript reads those of a traced graph as types.
"""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import fx, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import global_settings
from torchrec.inference.modules import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    shard_quant_model,
)

import recfx

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TABLES = {"users": (16, ["user", "friends"]), "movies": (8, ["movie"])}
FEATURES = ["movie", "user", "friends"]
HASHING: dict[str, Any] = {
    "adopted": recfx.HashConfig(),
    "static": None,
    "hashed": recfx.HashConfig(dense_rows=0, rows=80),
}
Ids = Callable[[KeyedJaggedTensor], KeyedJaggedTensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=dim, feature_names=features)
                for name, (dim, features) in TABLES.items()
            ]
        )
        self.linear = nn.Linear(40, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc(features).values())


def batch(size: int, seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * size,), generator=generator)
    ids = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


@pytest.fixture(autouse=True)
def _devices_are_passed_on() -> Iterator[None]:
    """Without this setting, TorchRec takes every device that it shards for, CPUs too, for a GPU."""
    before = global_settings.get_propogate_device()
    global_settings.set_propogate_device(True)
    yield
    global_settings.set_propogate_device(before)


def trained(hashing: str) -> tuple[nn.Module, nn.Module, Ids]:
    """A converted model, the same unconverted, and what makes the ids of the second from those of the first."""
    torch.manual_seed(0)
    model = recfx.convert(Model(), hashing=HASHING[hashing])
    _apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.5})
    for seed in range(3):
        model(batch(40, seed)).sum().backward()
    model.eval()
    if hashing != "hashed":
        return model, recfx.unconvert(model), lambda features: features
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    return model, plain, mapping.to_rows


def saved_and_loaded(model: nn.Module) -> Any:
    graph = torchrec.fx.Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(model)
    content = io.BytesIO()
    torch.jit.save(torch.jit.script(fx.GraphModule(model, graph)), content)
    content.seek(0)
    return torch.jit.load(content)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("hashing", HASHING)
def test_unconverted_models_are_quantized_sharded_and_scripted(hashing: str, world_size: int) -> None:
    model, plain, rows = trained(hashing)
    untouched = copy.deepcopy(plain)
    quantized = quantize_inference_model(plain)
    weights = get_table_to_weights_from_tbe(quantized)
    sharded, plan = shard_quant_model(
        copy.deepcopy(quantized), world_size=world_size, compute_device="cpu", sharding_device="cpu"
    )
    used = {rank for table in plan.plan["ebc"].values() for rank in table.ranks}
    assert used == set(range(world_size))
    assign_weights_to_tbe(sharded, weights)
    sharded(rows(batch(2, seed=0)))  # the first call makes its input dist, which cannot be traced
    loaded = saved_and_loaded(sharded)
    for size in (5, 1):
        features = batch(size, seed=1)
        as_rows = rows(features)
        expected = model(features)
        torch.testing.assert_close(untouched(as_rows), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loaded(as_rows), quantized(as_rows), rtol=1e-5, atol=1e-6)
        difference = (loaded(as_rows) - expected).detach().abs().max()
        assert 0 < float(difference) < 0.02
