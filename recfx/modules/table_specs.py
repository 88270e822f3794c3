"""From TorchRec's configs to the compiler's table descriptions; everything a table can be refused for is here."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    PoolingType,
    data_type_to_dtype,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from recfx.errors import ConversionError, type_of
from recfx.hashing import HashConfig
from recfx.hooks import has_call_hooks
from recfx.ir.tables import TableSpec


def allocate_bags(tables: list[EmbeddingBagConfig], device: torch.device | str | None) -> nn.ModuleDict:
    """One ``nn.EmbeddingBag`` per table, with its physical rows and its ``data_type``.

    Raises:
        ValueError: two tables have the same name; the message is that of the standard collection.
    """
    bags = nn.ModuleDict()
    for config in tables:
        if config.name in bags:
            raise ValueError(f"Duplicate table name {config.name}")
        hashing = getattr(config, "hashing", HashConfig())
        bags[config.name] = nn.EmbeddingBag(
            hashing.rows or config.num_embeddings,
            config.embedding_dim,
            mode=pooling_type_to_str(config.pooling),
            device=device,
            include_last_offset=True,
            dtype=data_type_to_dtype(config.data_type),
        )
    return bags


def check_config(config: object) -> None:
    """Refuse a config from which no table can be made.

    Raises:
        ConversionError: ``invalid_table_config``.
    """
    if not isinstance(config, EmbeddingBagConfig):
        raise ConversionError(
            f"a table is described by {type_of(config)}.",
            reason="invalid_table_config",
            what_to_do="pass a list of recfx.HashEmbeddingBagConfig.",
        )
    for field in ("num_embeddings", "embedding_dim"):
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1:
            raise ConversionError(
                f"{field} is {value!r}.",
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
    configs: list[EmbeddingBagConfig],
    bags: nn.ModuleDict,
    hashing: Mapping[str, HashConfig | None],
    is_weighted: bool,
    *,
    adopt: bool,
    collection: str = "",
) -> tuple[TableSpec, ...]:
    """Describe the tables of one collection.

    Args:
        configs: the collection's configs, in order.
        bags: one ``nn.EmbeddingBag`` per table.
        hashing: how each table's ids become rows; None leaves it static.
        is_weighted: whether the collection is weighted.
        adopt: True for tables that already exist, whose rows are dense by default.
        collection: fully qualified name, for messages.

    Raises:
        ConversionError: ``weighted_mean``, ``unsupported_pooling``, ``unsupported_bag``, ``unsupported_bag_option``,
            ``rows_shrink``, ``invalid_hash_config``.
    """
    names = get_embedding_names_by_table(configs)
    specs = []
    for config, embedding_names in zip(configs, names, strict=True):
        bag = check_bag(config, bags[config.name], is_weighted, collection)
        wanted = hashing[config.name]
        initial = _uniform_range(config)
        resolved = None if wanted is None else wanted.resolve(_rows(config, bag, adopt), adopt, config.name)
        specs.append(
            TableSpec(
                name=config.name,
                feature_names=tuple(config.feature_names),
                embedding_names=tuple(embedding_names),
                num_embeddings=bag.weight.shape[0] if resolved is None else resolved.rows,
                embedding_dim=bag.weight.shape[1],
                pooling=config.pooling.name,
                hashing=resolved,
                weight_init_min=initial[0] if initial is not None else 0.0,
                weight_init_max=initial[1] if initial is not None else 0.0,
                dtype=bag.weight.dtype,
                custom_init_fn=initial is None,
            )
        )
    return tuple(specs)


def _rows(config: EmbeddingBagConfig, bag: nn.EmbeddingBag, adopt: bool) -> int:
    return int(bag.weight.shape[0]) if adopt else config.num_embeddings


def check_bag(config: EmbeddingBagConfig, bag: nn.Module, is_weighted: bool, collection: str) -> nn.EmbeddingBag:
    """``bag``, if a batched lookup of its weight does the same.

    Raises:
        ConversionError: ``weighted_mean``, ``unsupported_pooling``, ``unsupported_bag``, ``unsupported_bag_option``.
    """
    plain = _plain_bag(config, bag, collection)
    _check(config, plain, is_weighted, collection)
    return plain


def _plain_bag(config: EmbeddingBagConfig, bag: nn.Module, collection: str) -> nn.EmbeddingBag:
    """``bag``, if nothing is lost by reading its weight without calling it."""
    problem = ""
    if not isinstance(bag, nn.EmbeddingBag) or type(bag).forward is not nn.EmbeddingBag.forward:
        problem = f"is {type_of(bag)} with its own forward"
    elif type(bag.__dict__["_parameters"].get("weight")) is not nn.Parameter:
        problem = "has a weight that is not a plain parameter (but a parametrization, for example)"
    elif has_call_hooks(bag):
        problem = "has forward or backward hooks, which a batched lookup would not run"
    elif bag.mode.upper() != config.pooling.name:
        problem = f"pools by {bag.mode}, but its config says {config.pooling.name}"
    if problem or not isinstance(bag, nn.EmbeddingBag):
        raise ConversionError(
            f"the nn.EmbeddingBag of table {config.name!r} {problem}.",
            reason="unsupported_bag",
            module_path=collection,
            what_to_do="use the bags that EmbeddingBagCollection makes, and put hooks on the collection.",
        )
    return bag


def _check(config: EmbeddingBagConfig, bag: nn.EmbeddingBag, is_weighted: bool, collection: str) -> None:
    if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ConversionError(
            f"table {config.name!r} has pooling {config.pooling.name}.",
            reason="unsupported_pooling",
            module_path=collection,
            what_to_do="use SUM or MEAN.",
        )
    if is_weighted and config.pooling is PoolingType.MEAN:
        raise ConversionError(
            f"table {config.name!r} is MEAN in a weighted collection, which the standard collection refuses as well.",
            reason="weighted_mean",
            module_path=collection,
            what_to_do="use PoolingType.SUM, and divide the weights as you intend.",
        )
    options = {
        "max_norm": (bag.max_norm, None),
        "scale_grad_by_freq": (bag.scale_grad_by_freq, False),
        "sparse": (bag.sparse, False),
        "padding_idx": (bag.padding_idx, None),
    }
    for option, (value, neutral) in options.items():
        if value != neutral:
            raise ConversionError(
                f"the nn.EmbeddingBag of table {config.name!r} has {option}={value!r}.",
                reason="unsupported_bag_option",
                module_path=collection,
                what_to_do=f"leave {option} at {neutral!r}; EmbeddingBagCollection never sets it.",
            )


def _uniform_range(config: EmbeddingBagConfig) -> tuple[float, float] | None:
    """The range from which ``init_fn`` fills rows; None if it is anything other than ``uniform_``.

    TorchRec's own default is ``partial(torch.nn.init.uniform_, a=min, b=max)``, made together with the config.
    """
    init_fn = config.init_fn
    if init_fn is None:
        return config.get_weight_init_min(), config.get_weight_init_max()
    if isinstance(init_fn, partial) and init_fn.func is nn.init.uniform_ and not init_fn.args:
        return float(init_fn.keywords.get("a", 0.0)), float(init_fn.keywords.get("b", 1.0))
    return None


def physical_configs(configs: list[EmbeddingBagConfig], specs: tuple[TableSpec, ...]) -> list[EmbeddingBagConfig]:
    """Copies of ``configs`` with the rows that the tables really have; the user's objects are never changed."""
    copies = []
    for config, spec in zip(configs, specs, strict=True):
        duplicate = copy(config)
        if spec.num_embeddings != config.num_embeddings:  # initial weights keep the range of the old number of rows
            duplicate.weight_init_min, duplicate.weight_init_max = (
                config.get_weight_init_min(),
                config.get_weight_init_max(),
            )
        duplicate.num_embeddings = spec.num_embeddings
        duplicate.feature_names = list(spec.feature_names)
        copies.append(duplicate)
    return copies
