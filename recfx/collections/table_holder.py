"""The module that holds a converted table's weight; the lookups read the weight, and never call the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from recfx.errors import ConversionError

# Attributes that change how nn.EmbeddingBag pools; `training` and the weight are followed.
_SETTINGS = frozenset(
    {"max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "include_last_offset", "padding_idx", "forward"}
)


class TableHolder(nn.EmbeddingBag):
    """An ``nn.EmbeddingBag`` that refuses what its lookup would otherwise ignore."""

    def __setattr__(self, name: str, value: Any) -> None:
        """As ``nn.Module``'s.

        Raises:
            ConversionError: ``unsupported_bag_option``, ``unsupported_bag``.
        """
        if name in _SETTINGS and (name == "forward" or value != self.__dict__.get(name, value)):
            what = "its own forward" if name == "forward" else f"{name}={value!r}"
            raise _refused(what, "unsupported_bag_option", "set it before the conversion, which says what it supports")
        if name == "__class__":  # the first thing that torch.nn.utils.parametrize does
            raise _refused("a parametrization", "unsupported_bag", "unconvert the model first")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """As ``nn.Module``'s.

        Raises:
            ConversionError: ``unsupported_bag``, because the lookups read the weight.
        """
        if name == "weight":
            raise _refused(
                "a parametrization (its weight is taken away)", "unsupported_bag", "unconvert the model first"
            )
        super().__delattr__(name)

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a hook that would never run.

        Raises:
            ConversionError: ``unsupported_bag``.
        """
        raise _refused("a hook", "unsupported_bag", "put the hook on the collection, or on the weight")

    register_forward_hook: Callable[..., Any] = _refuse_hook
    register_forward_pre_hook: Callable[..., Any] = _refuse_hook
    register_full_backward_hook: Callable[..., Any] = _refuse_hook
    register_full_backward_pre_hook: Callable[..., Any] = _refuse_hook
    register_backward_hook: Callable[..., Any] = _refuse_hook

    def _get_name(self) -> str:
        return "EmbeddingBag"  # how it prints


def hold(bags: nn.ModuleDict) -> None:
    """Make the ``nn.EmbeddingBag``s of a converted collection refuse what would be ignored."""
    for bag in bags._modules.values():
        if type(bag) is nn.EmbeddingBag:
            bag.__class__ = TableHolder


def all_held(bags: nn.ModuleDict) -> bool:
    """Whether no bag has been replaced since."""
    return set(map(type, bags._modules.values())) <= {TableHolder}


def release(bags: nn.ModuleDict) -> None:
    """Make the holders ``nn.EmbeddingBag``s again."""
    for bag in bags._modules.values():
        if type(bag) is TableHolder:
            object.__setattr__(bag, "__class__", nn.EmbeddingBag)


def _refused(what: str, reason: str, instead: str) -> ConversionError:
    return ConversionError(
        f"{what} was put on the nn.EmbeddingBag of a converted table, but all tables are looked up together, from "
        "their weights alone.",
        reason=reason,
        what_to_do=f"{instead}.",
    )
