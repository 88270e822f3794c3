"""Small collections that stand in for tables that this process does not hold, while a program is made and compared.

Rows are not the model's, so no output is; but every id has one, and the shapes, the keys and the dtypes are right, so
whatever the model computes from them can be traced and compared with itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_classes import converted_class
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.copy_modules import copy_modules
from recfx.collections.kinds import kind_of
from recfx.hashing import HashConfig
from recfx.ir.tables import TableSpec

_ROWS = 16
_HASHING = HashConfig(dense_rows=0, rows=_ROWS, unseen="share")


def with_stand_ins(model: nn.Module, collections: Mapping[str, ConvertedCollection]) -> nn.Module:
    """New modules around the same parameters, in which small collections take the place of ``collections``."""
    replacements: dict[int, nn.Module] = {id(each): stand_in(path, each) for path, each in collections.items()}
    copy, _ = copy_modules(model, replacements)
    return copy


def stand_in(path: str, collection: ConvertedCollection) -> UnshardedCollection:
    """A collection with the same keys and columns, which has a row for every id."""
    specs = tuple(_small(spec) for spec in collection.tables)
    kind = kind_of(collection)
    tables = {spec.name: kind.holder(_ROWS, spec.embedding_dim, dtype=spec.dtype, device="cpu") for spec in specs}
    made = converted_class(kind).from_tables(
        kind.configs_of(collection),
        specs,
        nn.ModuleDict(tables),
        collection.is_weighted(),
        "cpu",
        path,
        "auto",
        None,
    )
    made.eval()
    return made


def _small(spec: TableSpec) -> TableSpec:
    return replace(spec, num_embeddings=_ROWS, hashing=_HASHING.resolve(_ROWS, False, spec.name), custom_init_fn=False)
