"""A small model, converted, that trains on the device as it does on the CPU."""

from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recfx.api import convert
from recfx.commandline.doctor.checks import mismatch, tolerances
from recfx.hashing import HashConfig
from recfx.kernels.build import launch

STEPS = 5
_ROWS = 24

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
    "row-wise Adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
}
_HASHING = {
    "ids are rows": None,
    "raw ids": HashConfig.raw_ids(seed=3),
    "raw ids, old ones evicted": HashConfig.raw_ids(seed=3, on_full="evict"),
}
RUNS = (
    ("ids are rows", "SGD"), ("raw ids", "Adagrad"), ("ids are rows", "Adam"), ("raw ids", "row-wise Adagrad"),
    ("raw ids, old ones evicted", "Adagrad"),
)  # fmt: skip


def difference(ids: str, optimizer: str, device: torch.device) -> str:
    """What differs first between training on the device and on the CPU, in one line; ``""`` if nothing does."""
    expected = train(ids, optimizer, torch.device("cpu"), "auto")
    trained = train(ids, optimizer, device, "triton" if device.type == "cpu" and launch.is_interpreted() else "auto")
    return _difference(trained, expected, device)


def train(ids: str, optimizer: str, device: torch.device, backend: str) -> dict[str, Any]:
    """Outputs of every step and of one in eval mode, and all that is kept, on the CPU.

    Args:
        ids: a key of ``_HASHING``.
        optimizer: a key of ``_OPTIMIZERS``; it runs in the backward.
        device: where the model is.
        backend: as for ``recfx.convert``.
    """
    tables = [
        EmbeddingBagConfig(
            name=f"t{place}", num_embeddings=_ROWS, embedding_dim=dim, feature_names=[f"f{place}"], pooling=pooling
        )
        for place, (dim, pooling) in enumerate([(8, PoolingType.SUM), (5, PoolingType.MEAN), (64, PoolingType.SUM)])
    ]
    draw = torch.Generator().manual_seed(1)
    collection = EmbeddingBagCollection(tables)
    for weight in collection.parameters():
        weight.data = torch.rand(weight.shape, generator=draw) - 0.5
    kind, settings = _OPTIMIZERS[optimizer]
    apply_optimizer_in_backward(kind, collection.parameters(), settings)
    hashing = _HASHING[ids]
    distinct = 2 * _ROWS if hashing is not None and hashing.on_full == "evict" else _ROWS
    model: Any = convert(collection, hashing=hashing or HashConfig(), backend=backend, device=device)
    outputs = []
    for step in range(STEPS + 1):
        model.train(step < STEPS)
        output = model(_batch(step, hashing is not None, distinct).to(device)).values()
        if step < STEPS:
            (output - 1).square().sum().backward()
        outputs.append(output.detach().cpu())
    kept = {name: value.cpu() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for table, fused in model.fused_optimizers().items():
        kept |= {f"{table}.{name}": value.cpu() for name, value in fused.state.items() if isinstance(value, Tensor)}
    return {"outputs": outputs, **kept}


def _batch(step: int, raw: bool, distinct: int) -> KeyedJaggedTensor:
    """Four bags of up to five ids for each of three features."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 6, (12,), generator=draw)
    numbers = torch.randint(0, distinct, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor(["f0", "f1", "f2"], numbers * (2**40 if raw else 1) - 5 * raw, lengths=lengths)


def _difference(trained: dict[str, Any], expected: dict[str, Any], device: torch.device) -> str:
    """What differs first, in one line."""
    if trained.keys() != expected.keys():
        return f"{sorted(trained.keys() ^ expected.keys())} are in one state only"
    # Slots are placed by a seed that each index draws for itself.
    names = [name for name in expected if not name.endswith(("slot_groups", "side_row"))]
    differing = ((name, mismatch(trained[name], expected[name], tolerances(device))) for name in names)
    return next((f"{name}: {text}" for name, text in differing if text), "")
