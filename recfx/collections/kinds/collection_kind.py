"""``CollectionKind``: what differs between TorchRec's kinds of collections, so that nothing else asks for a class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recfx.errors import ConversionError, type_of
from recfx.runtime.base import has_call_hooks


@dataclass(frozen=True, eq=False)
class CollectionKind(ABC):
    """One kind of collection. A new kind is a subclass in a file of its own, and one line in each list of kinds.

    Args:
        name: its name, in one word.
        standard: TorchRec's class, whose instances and subclasses are converted.
        interface: TorchRec's interface, which foreign classes implement as well.
        sharded: TorchRec's class of the sharded collection, which is no home for a converted one.
        config: TorchRec's class of the configs.
        configs: the method that returns the configs.
        tables: the attribute that holds one module per table, by name; parameters have this prefix.
        holder: the class of these modules.
        call_arguments: what the standard forward names when it calls the module of a table.
        assembled_by: the kind of node that makes the collection's output.
        sharder: TorchRec's sharder of the standard collection.
    """

    name: str
    standard: type[nn.Module]
    interface: type[Any]
    sharded: type[nn.Module]
    config: type[BaseEmbeddingConfig]
    configs: str
    tables: str
    holder: type[nn.Module]
    call_arguments: frozenset[str]
    assembled_by: str
    sharder: type[ModuleSharder[Any]]

    # Names

    @property
    def configs_attribute(self) -> str:
        """The attribute in which TorchRec's class keeps the configs."""
        return f"_{self.configs}"

    def table_path(self, collection: str, table: str) -> str:
        """Fully qualified name of the module that holds a table's rows, of the collection of this name."""
        return f"{collection}.{self.tables}.{table}" if collection else f"{self.tables}.{table}"

    def weight_name(self, collection: str, table: str) -> str:
        """Fully qualified name of a table's parameter, in the standard and the converted model alike."""
        return f"{self.table_path(collection, table)}.weight"

    # Instances, standard or converted

    def configs_of(self, collection: nn.Module) -> list[Any]:
        """The configs of a collection of this kind, in order: those that it was made from, which its forward reads.

        A subclass of the user's may show others.
        """
        configs: list[Any] = getattr(collection, self.configs_attribute)
        return configs

    def tables_of(self, collection: nn.Module) -> nn.ModuleDict:
        """The modules that hold the rows of a collection of this kind, by name of the table."""
        tables: nn.ModuleDict = getattr(collection, self.tables)
        return tables

    def settings_of(self, collection: nn.Module) -> dict[str, Any]:
        """The settings of a standard or converted collection besides its configs, by the attributes that hold them."""
        return {}

    # What each kind does in its own way

    @abstractmethod
    def is_weighted(self, collection: Any) -> bool:
        """Whether a standard collection reads the weights of ids."""

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

    @abstractmethod
    def check_table(self, config: Any, table: nn.Module, is_weighted: bool, collection: str) -> Any:
        """The module of a table, if a batched lookup of its weight does the same as calling it.

        Raises:
            ConversionError: what is lost without calling it.
        """

    @abstractmethod
    def pooling(self, config: Any) -> str:
        """What becomes of the rows of one sample: the name of one of TorchRec's ``PoolingType``."""


# The attributes of a table that would change what a call returns, with the values that do not.
_OPTIONS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False, "padding_idx": None}


def plain_table(kind: CollectionKind, config: Any, table: Any, collection: str, problem: str = "") -> Any:
    """``table``, if nothing is lost by reading its weight without calling it.

    Args:
        problem: what else is wrong with it, as the end of a sentence.

    Raises:
        ConversionError: ``unsupported_bag``, ``unsupported_bag_option``.
    """
    holder, owner = kind.holder.__name__, kind.standard.__name__
    if table is None:
        problem = "is missing"
    elif not isinstance(table, kind.holder) or getattr(table.forward, "__func__", None) is not kind.holder.forward:
        problem = f"is {type_of(table)} with its own forward"
    elif type(table.__dict__["_parameters"].get("weight")) is not nn.Parameter:
        problem = "has a weight that is not a plain parameter (but a parametrization, for example, or fully sharded)"
    elif has_call_hooks(table):
        problem = "has forward or backward hooks, which a batched lookup would not run"
    if problem:
        raise ConversionError(
            f"the nn.{holder} of table {config.name!r} {problem}.",
            reason="unsupported_bag",
            module_path=collection,
            what_to_do=f"use the tables that {owner} makes, put hooks on the collection, and convert before the model "
            "is fully sharded.",
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
