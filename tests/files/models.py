"""The models in stored files. Earlier versions of recfx build them as well, so this asks nothing new of it."""

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import recfx

FEATURES = ["item", "user", "last_item", "day"]
HASHING = {
    "users": recfx.HashConfig(dense_rows=0),
    "goods": recfx.HashConfig(dense_rows=3, rows=32, unseen="share"),
    "days": recfx.HashConfig(),
    "visits": recfx.HashConfig(dense_rows=0),
    "steps": recfx.HashConfig(dense_rows=0, rows=28),
}
QUANTIZE = {"users": "int8", "goods": "int4", "visits": "int8", "steps": "fp16"}
CALLS = ((3, -20, 20), (2, -(2**63), 2**63 - 1), (0, 0, 1))


class Pooled(nn.Module):
    """Raw ids, dense ids and an adopted table: sums and means, two features that share a table, an odd width."""

    def __init__(self) -> None:
        super().__init__()

        def table(name: str, rows: int, dim: int, features: list[str], pooling: PoolingType) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, pooling=pooling
            )

        self.ebc = EmbeddingBagCollection(
            tables=[
                table("users", 24, 4, ["user"], PoolingType.MEAN),
                table("goods", 20, 5, ["item", "last_item"], PoolingType.SUM),
                table("days", 7, 1, ["day"], PoolingType.SUM),
            ]
        )
        self.over = nn.Linear(15, 2)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()) + dense


class Mixed(Pooled):
    """Pooled rows, and a row for each id of two more tables, in two collections, one with the ids as well."""

    def __init__(self) -> None:
        super().__init__()

        def collection(name: str, dim: int, features: list[str], need_indices: bool = False) -> nn.Module:
            table = EmbeddingConfig(name=name, num_embeddings=20, embedding_dim=dim, feature_names=features)
            return EmbeddingCollection(tables=[table], need_indices=need_indices)

        self.visits = collection("visits", 4, ["user"], need_indices=True)
        self.steps = collection("steps", 3, ["item", "last_item"])
        self.beside = nn.Linear(10, 2)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        user, steps = self.visits(features)["user"], self.steps(features)
        rows = user.values() * (user.weights() % 7).unsqueeze(1)  # the ids themselves
        parts = [torch.ops.fbgemm.jagged_2d_to_dense(rows, user.offsets(), 3).sum(dim=1)]
        for key in ("item", "last_item"):
            parts.append(steps[key].to_padded_dense(2).sum(dim=1))
        return self.over(self.ebc(features).values()) + self.beside(torch.cat(parts, dim=1)) + dense


def call(batch_size: int, seed: int = 0, low: int = -20, high: int = 20) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """A batch with ids from ``low`` to ``high``; those of ``day`` are rows of its table."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * batch_size,), generator=generator)
    ids = torch.randint(low, high, (int(lengths.sum()),), generator=generator)
    ids[ids.numel() - int(lengths[3 * batch_size :].sum()) :] %= 7
    return torch.rand(batch_size, 1, generator=generator), KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


def converted(model: nn.Module) -> nn.Module:
    own = {name.split(".")[-2] for name, _ in model.named_parameters() if "embedding" in name}
    made = recfx.convert(model, hashing={name: HASHING[name] for name in own})
    tables = [parameter for name, parameter in made.named_parameters() if "embedding" in name]
    apply_optimizer_in_backward(torch.optim.Adagrad, tables, {"lr": 0.5})
    return made


def trained(model_type: type[nn.Module]) -> nn.Module:
    """A converted model after two steps; its indexes hold ids, id -1 among them."""
    torch.manual_seed(0)
    made = converted(model_type())
    for seed in (0, 1):
        step(made, seed)
    return made


def step(model: nn.Module, seed: int) -> None:
    model.train()
    model(*call(4, seed, -12, 12)).square().sum().backward()
    model.eval()
