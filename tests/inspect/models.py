"""Small models whose reports the tests know by heart; also factories for the command line."""

from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import PoolingType

from tests.builders.managed_collisions import Model, learn, managed


class OwnForward(EmbeddingBagCollection):
    def forward(self, features: KeyedJaggedTensor) -> Any:
        return super().forward(features)


def config(number: int, rows: int = 100, dim: int = 8, pooling: PoolingType = PoolingType.SUM, **more: Any) -> Any:
    return EmbeddingBagConfig(
        name=f"t{number}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{number}"], pooling=pooling, **more
    )


def collection(tables: int = 2, kind: type[EmbeddingBagCollection] = EmbeddingBagCollection, **more: Any) -> Any:
    return kind(tables=[config(number, **more) for number in range(tables)])


def batch(ids: list[int], features: int = 2) -> KeyedJaggedTensor:
    """Two samples of equally many ids for each of the features."""
    length = len(ids) // (2 * features)
    lengths = torch.full((2 * features,), length)
    return KeyedJaggedTensor([f"f{number}" for number in range(features)], torch.tensor(ids), lengths=lengths)


def dlrm() -> tuple[DLRM, tuple[torch.Tensor, KeyedJaggedTensor]]:
    tables = [config(0), config(1, rows=50, pooling=PoolingType.MEAN)]
    model = DLRM(EmbeddingBagCollection(tables=tables), 4, [16, 8], [4, 1])
    return model, (torch.rand(2, 4), batch([1, 2, 3, 4, 5, 6, 7, 8]))


class Towers(nn.Module):
    """One collection under two names, one that is refused, one that is never called, one that is not pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.user = collection()
        self.item = self.user
        self.own = collection(1, OwnForward)
        self.unused = collection(1)
        self.sequence = EmbeddingCollection(
            tables=[EmbeddingConfig(name="s", embedding_dim=4, num_embeddings=10, feature_names=["f0"])]
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.user(features).values().sum() + self.item(features).values().sum()
        return pooled + self.own(features).values().sum() + self.sequence(features)["f0"].values().sum()


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.inner(features).values()


def towers() -> tuple[nn.Module, tuple[KeyedJaggedTensor]]:
    return Towers(), (batch([1, 2, 3, 4]),)


def only_model() -> nn.Module:
    return Wrapped(collection())


def nothing() -> None:
    return None


def fails() -> nn.Module:
    raise RuntimeError("the factory's own failure")


some_model = nn.Identity()


def many_tables() -> nn.Module:
    return Wrapped(collection(30))


STRANGE = (
    "a\nb",
    "esc\x1b[31m\0",
    "lone\udc80",
    "\u202eright to left",
    "таблица⚡",
    "</script><!--DATA-->",
    "l" * 3000,
)


def strange_names() -> tuple[nn.Module, tuple[KeyedJaggedTensor]]:
    tables = [config(number) for number in range(len(STRANGE))]
    for table, name in zip(tables, STRANGE, strict=True):
        table.name, table.feature_names = name, [name]
    ids = KeyedJaggedTensor(list(STRANGE), torch.ones(len(STRANGE)).long(), lengths=torch.ones(len(STRANGE)).int())
    return Wrapped(EmbeddingBagCollection(tables=tables)), (ids,)


class AsksForItsClass(Wrapped):
    """It returns something else once it is converted."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return super().forward(features) + (type(self.inner) is EmbeddingBagCollection)


def asks_for_its_class() -> tuple[nn.Module, tuple[KeyedJaggedTensor]]:
    return AsksForItsClass(collection()), (batch([1, 2, 3, 4]),)


def managed_collisions() -> nn.Module:
    """A model whose managed collisions have learned ids."""
    return Model(learn(managed(is_pooled=False)))
