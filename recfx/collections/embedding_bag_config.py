"""``HashEmbeddingBagConfig``: TorchRec's config of a table, and how the table's ids become rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recfx.collections.kinds import POOLED
from recfx.collections.table_specs import check_config
from recfx.hashing import HashConfig


@dataclass
class HashEmbeddingBagConfig(EmbeddingBagConfig):
    """A table of raw 64-bit ids: TorchRec's config and how its ids become rows.

    Args:
        hashing: see :class:`HashConfig`; by default the index gives out every row.
    """

    hashing: HashConfig = field(default_factory=HashConfig)

    def __post_init__(self) -> None:
        check_config(self, POOLED)  # before TorchRec divides by the rows
        super().__post_init__()
