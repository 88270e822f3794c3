"""A toy kind of collection: pooled like TorchRec's, with other classes and names throughout. This file is all of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recfx.collections.collection import UnshardedCollection
from recfx.collections.hash_collections import CONVERTED_CLASSES
from recfx.collections.kinds import KINDS, CollectionKind
from recfx.collections.sharding.collection import SHARDED, ShardedCollection


class StackConfig(BaseEmbeddingConfig):
    """The config of a table, whose rows are summed."""


class Stacks(nn.Module):
    """The standard collection: ``stacks`` holds its tables."""

    def __init__(self, configs: list[StackConfig], device: str | torch.device = "cpu") -> None:
        super().__init__()
        self._stack_configs, self._device = configs, torch.device(device)
        self.stacks = nn.ModuleDict(
            {config.name: STACKS.new_table(config, config.num_embeddings, device) for config in configs}
        )

    def stack_configs(self) -> list[StackConfig]:
        """The configs."""
        return self._stack_configs

    @property
    def device(self) -> torch.device:
        """Where its tables were made."""
        return self._device

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Sum the rows of each feature's ids."""
        by_feature = features.to_dict()
        sums = {
            name: self.stacks[config.name](input=by_feature[name].values(), offsets=by_feature[name].offsets())
            for config in self._stack_configs
            for name in config.feature_names
        }
        dims = [value.shape[1] for value in sums.values()]
        return KeyedTensor(list(sums), dims, torch.cat(list(sums.values()), dim=1))


class ShardedStacksOfTorchRec(nn.Module):
    """What TorchRec would make of ``Stacks``, had it such a thing."""


class StackKind(CollectionKind):
    """See ``CollectionKind``."""

    name = "stacks"
    standard = Stacks
    interface = Stacks
    sharded = ShardedStacksOfTorchRec
    config = StackConfig
    configs = "stack_configs"
    tables = "stacks"
    holder = nn.EmbeddingBag
    assembled_by = "keyed_tensor"
    sharder = BaseEmbeddingSharder

    def is_weighted(self, collection: Any) -> bool:
        """Never."""
        return False

    def empty_like(self, converted: Any) -> Stacks:
        """On meta."""
        return Stacks(self.configs_of(converted), "meta")

    def values_of(self, output: Any) -> Mapping[str, torch.Tensor]:
        """The values of a ``KeyedTensor`` by key."""
        return dict(output.to_dict())

    def new_table(self, config: Any, rows: int, device: torch.device | str | None) -> nn.EmbeddingBag:
        """Summed."""
        return nn.EmbeddingBag(rows, config.embedding_dim, mode="sum", device=device, include_last_offset=True)

    def table_around(self, rows: torch.Tensor, pooling: str) -> nn.EmbeddingBag:
        """Summed."""
        return nn.EmbeddingBag(rows.shape[0], rows.shape[1], mode="sum", _weight=rows, include_last_offset=True)

    def check_table(self, config: Any, table: nn.Module, is_weighted: bool, collection: str) -> Any:
        """Every table will do."""
        return table

    def pooling(self, config: Any) -> str:
        """Always the same."""
        return "SUM"


STACKS = StackKind()


class HashStacks(UnshardedCollection):
    """The converted collection."""

    _kind = STACKS

    def stack_configs(self) -> list[StackConfig]:
        """The configs."""
        return self._stack_configs

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Answer as the forward of the standard collection does."""
        return self._enter(self._run, self._run, features)


class ShardedStacks(ShardedCollection):
    """The sharded collection."""

    _kind = STACKS

    def stack_configs(self) -> list[StackConfig]:
        """The configs."""
        return self._stack_configs


@contextmanager
def known() -> Iterator[None]:
    """While the lists of kinds have one line more."""
    KINDS.append(STACKS)
    CONVERTED_CLASSES[STACKS], SHARDED[STACKS] = HashStacks, ShardedStacks
    try:
        yield
    finally:
        KINDS.remove(STACKS)
        del CONVERTED_CLASSES[STACKS], SHARDED[STACKS]
