"""The arguments of a call in a traced graph, and what is known of their values."""

from __future__ import annotations

from typing import Any, Protocol

from torch import fx, nn

from recfx.discovery.known_values import Ids


class Values(Protocol):
    """What is known of the values of one graph.

    Attributes:
        root: the module that it was traced from.
    """

    root: nn.Module

    def of(self, node: Any) -> Any:
        """``Ids``, ``Features``, ``Object``, or None for nothing. A number is known as such."""
        ...


def first_of(node: fx.Node) -> Any:
    """The tensor that a call is about."""
    return node.args[0] if node.args else node.kwargs.get("input")


def operands(node: fx.Node, names: tuple[str, ...]) -> list[Any] | None:
    """The arguments by position or name, None where one is missing; None if there are others."""
    if len(node.args) > len(names) or set(node.kwargs) - set(names[len(node.args) :]):
        return None
    return [*node.args, *(node.kwargs.get(name) for name in names[len(node.args) :])]


def ids_and_constant(values: Values, node: fx.Node) -> tuple[Ids, int] | None:
    """The operands of a call on ids and a number; None if it is not one."""
    given = operands(node, ("input", "other"))
    if given is None or type(given[1]) is not int:
        return None
    ids = values.of(given[0])
    return (ids, given[1]) if isinstance(ids, Ids) and isinstance(given[0], fx.Node) else None
