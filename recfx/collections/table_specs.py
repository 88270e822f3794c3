"""From TorchRec's configs to the compiler's table descriptions; everything a table can be refused for is here."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from recfx.collections.kinds import CollectionKind
from recfx.errors import ConversionError, type_of
from recfx.hashing import HashConfig, as_integer
from recfx.ir.tables import TableSpec


def allocate_tables(
    kind: CollectionKind, configs: list[BaseEmbeddingConfig], device: torch.device | str | None
) -> nn.ModuleDict:
    """One module per table, with its physical rows and its ``data_type``."""
    tables = nn.ModuleDict()
    for config in configs:
        if config.name in tables:
            raise ValueError(f"Duplicate table name {config.name}")
        hashing = getattr(config, "hashing", HashConfig())
        tables[config.name] = kind.new_table(config, hashing.rows or config.num_embeddings, device)
    return tables


def check_config(config: Any, kind: CollectionKind) -> None:
    """Refuse a config from which no table of a collection of this kind can be made (``invalid_table_config``)."""
    if not isinstance(config, kind.config):
        raise ConversionError(
            f"a table is described by {type_of(config)}.",
            reason="invalid_table_config",
            what_to_do=f"pass a list of recfx.Hash{kind.config.__name__}.",
        )
    for field in ("num_embeddings", "embedding_dim"):
        value = as_integer(getattr(config, field))
        if value is None or value < 1:
            raise ConversionError(
                f"{field} is {getattr(config, field)!r}.",
                reason="invalid_table_config",
                module_path=str(config.name),
                what_to_do=f"{field} must be an integer of at least 1.",
            )
    hashing = getattr(config, "hashing", HashConfig())
    if not isinstance(hashing, HashConfig):
        raise ConversionError(
            f"hashing is {'None' if hashing is None else 'a ' + type(hashing).__name__}.",
            reason="invalid_table_config",
            module_path=str(config.name),
            what_to_do="pass a recfx.HashConfig. For a table whose ids are rows, build the standard collection and "
            "call recfx.convert(..., hashing=None).",
        )


def describe_tables(
    kind: CollectionKind,
    configs: list[Any],
    tables: nn.ModuleDict,
    hashing: Mapping[str, HashConfig | None],
    is_weighted: bool,
    *,
    adopt: bool,
    collection: str = "",
) -> tuple[TableSpec, ...]:
    """Describe the tables of one collection. ``adopt``: they exist already, so that their rows are dense by default."""
    names = get_embedding_names_by_table(configs)
    specs = []
    for config, embedding_names in zip(configs, names, strict=True):
        weight = kind.check_table(config, tables[config.name], is_weighted, collection).weight
        config_of_ids = hashing[config.name]
        initial = _uniform_range(config)
        rows = int(weight.shape[0]) if adopt else config.num_embeddings
        resolved = None if config_of_ids is None else config_of_ids.resolve(rows, adopt, config.name)
        specs.append(
            TableSpec(
                name=config.name,
                feature_names=tuple(config.feature_names),
                embedding_names=tuple(embedding_names),
                num_embeddings=weight.shape[0] if resolved is None else resolved.rows,
                embedding_dim=weight.shape[1],
                pooling=kind.pooling(config),
                hashing=resolved,
                weight_init_min=initial[0] if initial is not None else 0.0,
                weight_init_max=initial[1] if initial is not None else 0.0,
                dtype=weight.dtype,
                custom_init_fn=initial is None,
            )
        )
    return tuple(specs)


def _uniform_range(config: BaseEmbeddingConfig) -> tuple[float, float] | None:
    """The range from which ``init_fn`` fills rows; None if it is not ``uniform_``, which is TorchRec's default."""
    init_fn = config.init_fn
    if init_fn is None:
        return config.get_weight_init_min(), config.get_weight_init_max()
    if isinstance(init_fn, partial) and init_fn.func is nn.init.uniform_ and not init_fn.args:
        return float(init_fn.keywords.get("a", 0.0)), float(init_fn.keywords.get("b", 1.0))
    return None


def physical_configs(configs: list[Any], specs: tuple[TableSpec, ...]) -> list[Any]:
    """Copies of ``configs`` with the rows that the tables really have; the user's objects are never changed."""
    copies = []
    for config, spec in zip(configs, specs, strict=True):
        duplicate = copy(config)
        if spec.num_embeddings != config.num_embeddings:  # initial weights keep the range of the old number of rows
            duplicate.weight_init_min = config.get_weight_init_min()
            duplicate.weight_init_max = config.get_weight_init_max()
        duplicate.num_embeddings = spec.num_embeddings
        duplicate.feature_names = list(spec.feature_names)
        copies.append(duplicate)
    return copies
