"""The operators of the graph as functions: a node is an fx ``call_function`` of one of them.

They are data: calling one is an error, because ``lower`` makes what runs. Under a tracer, one leaves itself in the
trace, so tracing a graph again gives the same nodes.
"""

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.overrides import handle_torch_function, has_torch_function

from recfx.errors import ConversionError
from recfx.ir.node_kinds import NODE_KINDS, NodeKind


def _operator(name: str) -> Callable[..., Any]:
    def operator(*inputs: Any, **attributes: Any) -> Any:
        if has_torch_function(inputs):
            return handle_torch_function(operator, inputs, *inputs, **attributes)
        raise RuntimeError(f"{name} is an operator of a graph, which is data: it must be lowered before it runs.")

    operator.__name__ = operator.__qualname__ = name
    operator.__module__ = __name__  # torch.fx imports it from here, for generated code and pickles
    operator.__doc__ = NODE_KINDS[name].meaning
    return operator


OPERATORS: dict[str, Callable[..., Any]] = {name: _operator(name) for name in NODE_KINDS}
"""The function of each kind of node."""

globals().update(OPERATORS)


def operator_of(kind: str) -> Callable[..., Any]:
    """The function of a kind of node, which may have been declared later."""
    if kind not in NODE_KINDS:
        raise ConversionError(
            f"there is no operator {kind!r}.",
            reason="unknown_operator",
            what_to_do="declare it with recfx.add_operator, in the module that defines the pass.",
        )
    if kind not in OPERATORS:
        OPERATORS[kind] = globals()[kind] = _operator(kind)
    return OPERATORS[kind]


def kind_of(node: fx.Node) -> NodeKind | None:
    """The kind of a node; None if it does not call an operator."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return NODE_KINDS.get(name) if OPERATORS.get(name) is node.target else None
