"""The module that holds a converted table's weight; the lookups read the weight, and never call the module."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.optim.swa_utils import AveragedModel

from recfx.collections.converted_collection import converted_collections
from recfx.collections.first_use import wrap_once
from recfx.errors import ConversionError

# Attributes that change what calling the module returns; `training` and the weight are followed.
_SETTINGS = frozenset(
    {"max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "include_last_offset", "padding_idx", "forward"}
)


class _Holder(nn.Module):
    """A table's module that refuses what its lookup would otherwise ignore: ``unsupported_bag``,
    ``unsupported_bag_option``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTINGS and (name == "forward" or value != self.__dict__.get(name, value)):
            what = "its own forward" if name == "forward" else f"{name}={value!r}"
            instead = "set it before the conversion, which says what it supports"
            raise self._refused(what, "unsupported_bag_option", instead)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            raise self._refused(
                "a parametrization, or FullyShardedDataParallel (either takes its weight away)",
                "unsupported_bag",
                "unconvert the model first; or give FullyShardedDataParallel the dense part of the model alone "
                "(ignored_modules), or call fully_shard on the converted model",
            )
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name != "weight":  # lookups read no other; pruning begins so
            raise self._refused(f"a parameter {name!r}, as by pruning,", "unsupported_bag", "unconvert the model first")
        super().register_parameter(name, param)

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refused("a hook", "unsupported_bag", "put the hook on the collection, or on the weight")

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def _get_name(self) -> str:
        return _STANDARD[type(self)].__name__  # how it prints

    def _refused(self, what: str, reason: str, instead: str) -> ConversionError:
        return ConversionError(
            f"{what} was put on the nn.{self._get_name()} of a converted table, but all tables are looked up together, "
            "from their weights alone.",
            reason=reason,
            what_to_do=f"{instead}.",
        )


class TableHolder(_Holder, nn.EmbeddingBag):
    """The ``nn.EmbeddingBag`` of a converted table."""


class EmbeddingHolder(_Holder, nn.Embedding):
    """The ``nn.Embedding`` of a converted table."""


_HOLDERS: dict[type[nn.Module], type[_Holder]] = {nn.EmbeddingBag: TableHolder, nn.Embedding: EmbeddingHolder}
_STANDARD: dict[type[nn.Module], type[nn.Module]] = {holder: standard for standard, holder in _HOLDERS.items()}


def hold(tables: nn.ModuleDict) -> None:
    """Make the modules of a converted collection's tables refuse what would be ignored."""
    for table in tables._modules.values():
        if type(table) in _HOLDERS:
            object.__setattr__(table, "__class__", _HOLDERS[type(table)])


def all_held(tables: nn.ModuleDict) -> bool:
    """Whether no table's module has been replaced since."""
    return set(map(type, tables._modules.values())) <= _STANDARD.keys()


def guard_tables() -> None:
    """Let ``AveragedModel`` refuse tables with an index. Called once by ``first_use``, and idempotent."""
    wrap_once(AveragedModel, "update_parameters", _refusing_indexes)


def _refusing_indexes(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def extended(averaged: AveragedModel, model: nn.Module) -> None:
        for path, collection in converted_collections(model).items():
            if collection.tables_with_index():
                raise ConversionError(
                    "AveragedModel averages row by row, but a row of a table with an index belongs to one id after "
                    "another.",
                    reason="averaged_index",
                    module_path=path,
                    what_to_do="average the rest of the model.",
                )
        original(averaged, model)

    return extended


def release(tables: nn.ModuleDict) -> None:
    """Make the holders standard modules again."""
    for table in tables._modules.values():
        if type(table) in _STANDARD:
            object.__setattr__(table, "__class__", _STANDARD[type(table)])
