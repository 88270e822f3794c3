"""``CollectionKind``: what differs between TorchRec's kinds of collections, so that nothing else asks for a class."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)

from recfx.errors import ConversionError, type_of
from recfx.hashing import HashConfig, as_integer
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.tables import TableSpec
from recfx.runtime.base import has_call_hooks


class CollectionKind(ABC):
    """One kind of collection. A new kind is a subclass, and one line in each list of kinds."""

    name: str  # in one word
    standard: type[nn.Module]  # TorchRec's class, whose instances and subclasses are converted
    interface: type[Any]  # TorchRec's interface, which foreign classes implement as well
    sharded: type[nn.Module]  # TorchRec's class of the sharded collection, which is no home for a converted one
    config: type[BaseEmbeddingConfig]
    configs: str  # the method that returns the configs; TorchRec's classes keep them in the attribute ``_<configs>``
    tables: str  # the attribute that holds one module per table, by name; parameters have this prefix
    holder: type[nn.Module]  # the class of these modules
    assembled_by: str  # the kind of node that makes the collection's output
    sharder: type[ModuleSharder[Any]]  # TorchRec's sharder of the standard collection

    @property
    def configs_attribute(self) -> str:
        """The attribute in which TorchRec's class keeps the configs."""
        return f"_{self.configs}"

    def table_path(self, collection: str, table: str) -> str:
        """Fully qualified name of the module that holds a table's rows, of the collection of this name."""
        return f"{collection}.{self.tables}.{table}".removeprefix(".")

    def weight_name(self, collection: str, table: str) -> str:
        """Fully qualified name of a table's parameter, in the standard and the converted model alike."""
        return f"{self.table_path(collection, table)}.weight"

    def configs_of(self, collection: nn.Module) -> list[Any]:
        """The configs that the forward of a collection, standard or converted, reads; a subclass may show others."""
        return getattr(collection, self.configs_attribute)

    def tables_of(self, collection: nn.Module) -> nn.ModuleDict:
        """The modules that hold the rows of a collection, standard or converted, by name of the table."""
        return getattr(collection, self.tables)

    def settings_of(self, collection: nn.Module) -> dict[str, Any]:
        """The settings of a standard or converted collection besides its configs, by the attributes that hold them."""
        return {}

    def is_weighted(self, collection: Any) -> bool:
        """Whether a standard collection reads the weights of ids."""
        return False

    @abstractmethod
    def empty_like(self, converted: Any) -> Any:
        """A standard collection with the configs and settings of a converted one, its tables on meta."""

    @abstractmethod
    def values_of(self, output: Any) -> Mapping[str, torch.Tensor]:
        """The values of a collection's output, by key."""

    @abstractmethod
    def new_table(self, config: Any, rows: int, device: torch.device | str | None) -> nn.Module:
        """The module that holds the rows of a new table, as TorchRec makes it."""

    @abstractmethod
    def table_around(self, rows: torch.Tensor, pooling: str) -> nn.Module:
        """A module that holds ``[rows, dim]`` rows that exist; ``pooling`` as :meth:`pooling` returns it."""

    def check_table(self, config: Any, table: Any, is_weighted: bool, collection: str) -> Any:
        """The module of a table, if a batched lookup of its weight does the same as calling it."""
        holder, owner, problem = self.holder.__name__, self.standard.__name__, ""
        if table is None:
            problem = "is missing"
        elif not isinstance(table, self.holder) or getattr(table.forward, "__func__", None) is not self.holder.forward:
            problem = f"is {type_of(table)} with its own forward"
        elif type(table.__dict__["_parameters"].get("weight")) is not nn.Parameter:
            problem = "has a weight that is not a plain parameter (but a parametrization, say, or fully sharded)"
        elif (dimensions := table.__dict__["_parameters"]["weight"].dim()) != 2:
            problem = f"has a weight of {dimensions} dimensions (a part of one that is fully sharded, perhaps)"
        elif has_call_hooks(table):
            problem = "has forward or backward hooks, which a batched lookup would not run"
        elif isinstance(table, nn.EmbeddingBag) and table.mode.upper() != self.pooling(config):
            problem = f"pools by {table.mode}, but its config says {self.pooling(config)}"
        if problem:
            raise ConversionError(
                f"the nn.{holder} of table {config.name!r} {problem}.",
                reason="unsupported_bag",
                module_path=collection,
                what_to_do=f"use the tables that {owner} makes, put hooks on the collection, call fully_shard later.",
            )
        for option, neutral in _OPTIONS.items():
            value = getattr(table, option)
            if value != neutral:
                raise ConversionError(
                    f"the nn.{holder} of table {config.name!r} has {option}={value!r}.",
                    reason="unsupported_bag_option",
                    module_path=collection,
                    what_to_do=f"leave {option} at {neutral!r}; {owner} never sets it.",
                )
        return table

    @abstractmethod
    def pooling(self, config: Any) -> str:
        """What becomes of the rows of one sample: the name of one of TorchRec's ``PoolingType``."""


# The attributes of a table that would change what a call returns, with the values that do not.
_OPTIONS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False, "padding_idx": None}


class PooledKind(CollectionKind):
    """``EmbeddingBagCollection``, which sums or averages the rows of a sample's ids."""

    name = "pooled"
    standard = EmbeddingBagCollection
    interface = EmbeddingBagCollectionInterface
    sharded = ShardedEmbeddingBagCollection
    config = EmbeddingBagConfig
    configs = "embedding_bag_configs"
    tables = "embedding_bags"
    holder = nn.EmbeddingBag
    assembled_by = "keyed_tensor"
    sharder = EmbeddingBagCollectionSharder

    def is_weighted(self, collection: Any) -> bool:
        return bool(collection.is_weighted())

    def empty_like(self, converted: Any) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(self.configs_of(converted), converted.is_weighted(), torch.device("meta"))

    def values_of(self, output: Any) -> Mapping[str, torch.Tensor]:
        return output.to_dict()

    def new_table(self, config: Any, rows: int, device: torch.device | str | None) -> nn.EmbeddingBag:
        mode, dtype = pooling_type_to_str(config.pooling), data_type_to_dtype(config.data_type)
        dim = config.embedding_dim
        return nn.EmbeddingBag(rows, dim, mode=mode, device=device, include_last_offset=True, dtype=dtype)

    def table_around(self, rows: torch.Tensor, pooling: str) -> nn.EmbeddingBag:
        count, dim = rows.shape
        return nn.EmbeddingBag(count, dim, mode=pooling.lower(), _weight=rows, include_last_offset=True)

    def check_table(self, config: Any, table: nn.Module, is_weighted: bool, collection: str) -> Any:
        plain = super().check_table(config, table, is_weighted, collection)
        if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            reason, what, what_to_do = "unsupported_pooling", f"has pooling {config.pooling.name}", "use SUM or MEAN."
        elif is_weighted and config.pooling is PoolingType.MEAN:
            reason, what = "weighted_mean", "is MEAN in a weighted collection, which the standard collection refuses"
            what_to_do = "use PoolingType.SUM, and divide the weights as you intend."
        else:
            return plain
        message = f"table {config.name!r} {what}."
        raise ConversionError(message, reason=reason, module_path=collection, what_to_do=what_to_do)

    def pooling(self, config: Any) -> str:
        return config.pooling.name


class SequenceKind(CollectionKind):
    """``EmbeddingCollection``, whose output has a row for each id. The weights of ids are ignored."""

    name = "sequence"
    standard = EmbeddingCollection
    interface = EmbeddingCollectionInterface
    sharded = ShardedEmbeddingCollection
    config = EmbeddingConfig
    configs = "embedding_configs"
    tables = "embeddings"
    holder = nn.Embedding
    assembled_by = "jagged_dict"
    sharder = EmbeddingCollectionSharder

    def settings_of(self, collection: Any) -> dict[str, Any]:
        """Whether the output has the ids, and how TorchRec's sharded collection puts rows into order."""
        names = ("_need_indices", "_use_gather_select", "_use_gather_select_per_sharding")
        return {name: collection.__dict__[name] for name in names if name in collection.__dict__}

    def empty_like(self, converted: Any) -> EmbeddingCollection:
        standard = EmbeddingCollection(self.configs_of(converted), torch.device("meta"))
        standard.__dict__.update(self.settings_of(converted))
        return standard

    def values_of(self, output: Any) -> Mapping[str, torch.Tensor]:
        return {key: jagged.values() for key, jagged in output.items()}

    def new_table(self, config: Any, rows: int, device: torch.device | str | None) -> nn.Embedding:
        dtype = torch.float32 if config.data_type == DataType.FP32 else torch.float16  # as TorchRec makes it
        return nn.Embedding(rows, config.embedding_dim, device=device, dtype=dtype)

    def table_around(self, rows: torch.Tensor, pooling: str) -> nn.Embedding:
        count, dim = rows.shape
        return nn.Embedding(count, dim, _weight=rows)

    def pooling(self, config: Any) -> str:
        return NOT_COMBINED


POOLED, SEQUENCE = PooledKind(), SequenceKind()
KINDS: list[CollectionKind] = [POOLED, SEQUENCE]


def standard_kind(module: nn.Module) -> CollectionKind | None:
    """The kind of a standard collection, or of a converted one that stands for a user's subclass; otherwise None."""
    return next((kind for kind in KINDS if isinstance(module, kind.standard)), None)


def kind_of(collection: nn.Module) -> CollectionKind:
    """The kind of a standard or converted collection. Attributes that users add cannot hide it."""
    kind = getattr(type(collection), "_kind", None)
    if not isinstance(kind, CollectionKind):
        kind = standard_kind(collection)
    if kind is None:
        raise TypeError(f"{type(collection).__name__} is no collection of a known kind")
    return kind


def shown_by(module: nn.Module) -> tuple[str, str] | None:
    """By which method and attribute a class that implements one of TorchRec's interfaces shows configs and tables."""
    return next(((kind.configs, kind.tables) for kind in KINDS if isinstance(module, kind.interface)), None)


def table_in(path: str) -> tuple[str, str]:
    """The collection and the table that the path of a table's module names; the table is ``""`` if it names none."""
    for kind in KINDS:
        owner, prefix, table = path.rpartition(f"{kind.tables}.")
        if prefix:
            return owner.removesuffix("."), table
    return path, ""


# From TorchRec's configs to the compiler's table descriptions


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
    kind: CollectionKind, configs: list[Any], tables: nn.ModuleDict, hashing: Mapping[str, HashConfig | None],
    is_weighted: bool, *, adopt: bool, collection: str = "",
) -> tuple[TableSpec, ...]:  # fmt: skip
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
