"""``recfx.add_operator``: declares an operator that passes of the user's put into graphs."""

import keyword
import re
from collections.abc import Callable

import torch
from torch import fx, nn

from recfx.errors import ConversionError
from recfx.errors.argument_types import typed
from recfx.ir import operators
from recfx.ir.node_kinds import NODE_KINDS, NodeKind, ValueType
from recfx.planner.pricing.formulas import FORMULAS, Formula
from recfx.runtime.lower_graph import OWN_MAKERS
from recfx.runtime.lowered import Lowered

_OURS = frozenset(NODE_KINDS)
_PLAIN = (bool, int, float, str, torch.dtype, tuple)
_ARGUMENTS = ("collection", "kind", "inputs", "node", "self")  # the arguments of ``OperatorGraph.add`` and ``change``
_MEANT = {"tables": tuple, "hashed": tuple, "divided": tuple, "way": str, "hop": int, "kernel": str}
_WITH_COLUMNS = {ValueType.POOLED, ValueType.ARRIVED_POOLED, ValueType.DIVIDED}


@typed(ConversionError)
def add_operator(kind: NodeKind, make: Callable[[Lowered], nn.Module], price: Formula | None = None) -> None:
    """Declare an operator, so that ``graph.add(kind.name, inputs, collection, **attributes)`` makes nodes of it.

    Declare it in the module that defines the pass, so that a process that loads a pickled model declares it, too. A
    declaration of the same name replaces an earlier one, for graphs that are made afterwards.

    Example:
        >>> from recfx.ir import Input, NodeKind, Stage, ValueType
        >>> from recfx.passes import PassResult, Rewrite
        >>> rows = (ValueType.POOLED,)
        >>> scale = NodeKind("scale", "rows times ten", inputs=(Input(rows),), like_input=True, stage=Stage.LOOKUP)
        >>> class Scale(torch.nn.Module):
        ...     def forward(self, rows):
        ...         return 10 * rows
        >>> recfx.add_operator(scale, lambda of: Scale())
        >>> def insert_scale(graph):
        ...     for lookup in graph.of_kind("lookup"):
        ...         with graph.graph.inserting_after(lookup):
        ...             graph.replace(lookup, graph.add("scale", (lookup,), graph.collection(lookup).name))
        ...     return PassResult(graph)
        >>> model = recfx.convert(Model(), passes=[*recfx.passes(), Rewrite("insert_scale", insert_scale)])
        >>> model(batch).shape
        torch.Size([2, 1])

    Args:
        kind: its declaration. What recfx's own passes, prices and drawings know of the operator is in it: the types of
            its inputs and of its output, its stage of a step, its attributes; with ``like_input=True``, that its value
            has the tables, the columns and the size of its first input.
        make: makes the module that runs for a node, from ``of.attributes``. Its forward takes the values of the node's
            inputs. It must hold no parameters or buffers; to be exported, it must compile with ``torch.jit.script``.
        price: what a node does, for ``recfx.cost`` and drawings: from
            :class:`recfx.planner.pricing.node_facts.NodeFacts` to :class:`recfx.planner.pricing.work.Phases`.
            Its backward counts only in training. Without it, a model with such nodes has no cost.

    Raises:
        ConversionError: ``invalid_argument``.
    """
    wrong = [
        name
        for name, of_type in kind.attributes.items()
        if not name.isidentifier() or name in _ARGUMENTS or of_type not in _PLAIN
        or of_type is not _MEANT.get(name, of_type)
    ]  # fmt: skip
    declares_value = bool(kind.outputs) and not _WITH_COLUMNS.intersection(kind.outputs)
    if kind.like_input:
        declares_value = bool(kind.inputs) and ValueType.BATCH not in kind.inputs[0].types
    for is_wrong, what, what_to_do in (
        (
            kind.name not in OWN_MAKERS and _has_meaning(kind.name),
            f"no operator can have the name {kind.name!r}",
            "give it another name: an identifier that does not end with a number and has no other meaning in graphs.",
        ),
        (
            wrong,
            f"{kind.name} has an attribute {', '.join(map(repr, wrong))} with this type",
            "attributes are bool, int, float, str, torch.dtype or tuple; tables, hashed and divided are tuples of "
            f"tables, way a way back; and {', '.join(map(repr, _ARGUMENTS))} mean something else.",
        ),
        (
            kind.cut_before or not declares_value,
            f"{kind.name} does not declare what its value is, or has cut_before=True",
            "declare outputs=(...,), or like_input=True and a first input that has columns or ids of tables: what "
            "returns pooled rows has the columns of its first input. recfx's own operators say where graphs are cut.",
        ),
    ):
        if is_wrong:
            raise ConversionError(f"{what}.", reason="invalid_argument", what_to_do=what_to_do)
    NODE_KINDS[kind.name], OWN_MAKERS[kind.name] = kind, make
    FORMULAS.pop(kind.name, None)
    if price is not None:
        FORMULAS[kind.name] = price


def _has_meaning(name: str) -> bool:
    """Whether no operator can have this name: nodes call modules and functions of this name."""
    no_name = not name.isidentifier() or keyword.iskeyword(name) or re.search(r"_\d+$", name) is not None
    in_graphs = hasattr(fx.GraphModule(nn.Module(), fx.Graph()), name) or hasattr(operators, name)
    return no_name or name in _OURS or (in_graphs and name not in operators.OPERATORS)
