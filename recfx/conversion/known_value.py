"""A value that Python needs while a model is traced, if it is the same for batches of any size and with any ids."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import fx, nn

from recfx.collections.copy_modules import copy_with_tensors
from recfx.collections.sharding.collection import sharded_collections
from recfx.discovery.sample import Sample, fixed_randomness
from recfx.discovery.shallow_tracer import ValueNeeded, fixed_value

_READ_VALUES = ("item", "tolist")


def known_value(root: nn.Module, sample: Sample, needed: ValueNeeded) -> int | list[str]:
    """Run what was traced so far on the sample, on one of another size and on one without ids, on copies of ``root``.

    Raises:
        ValueNeeded: the values differ, or are no numbers, keys or counts. It is raised again, with a reason.
    """
    node, calls = needed.node, [sample, sample.resized(), sample.without_ids()]
    why = "it is read from a tensor" if _reads_values(node) else ""
    if not why and sharded_collections(root):
        why = "its collections are sharded"  # ranks would have to run it together
    values: list[Any] = []
    for call in calls if not why else ():
        try:
            if call is not None:
                values.append(fixed_value(_run(root, node, call), needed.number))
        except Exception:  # a model need not take every batch, and then the comparison leaves it out as well
            if call is sample:
                raise
    if not why and values[0] is not None and all(value == values[0] for value in values):
        known: int | list[str] = values[0]
        return known
    if not why:
        seen = " or ".join(dict.fromkeys(map(str, values)))
        why = "it is read from a tensor" if values[0] is None else f"it is {seen}, as the batch has samples and ids"
    needed.args = (f"Python needs the value of {node.name} while it is traced, but {why}",)
    raise needed


def _reads_values(node: fx.Node) -> bool:
    """Whether a number was read from a tensor on the way to the node."""
    seen, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        if one.op == "call_method" and one.target in _READ_VALUES:
            return True
        waiting += set(one.all_input_nodes) - seen
        seen.update(one.all_input_nodes)
    return False


def _run(root: nn.Module, node: fx.Node, call: Sample) -> Any:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(node.graph, copies)
    graph.output(copies[node])
    call = call.clone()
    by_name = {f"argument_{position}": value for position, value in enumerate(call.args)} | call.kwargs
    if "forward" not in root.__dict__:
        bound = inspect.signature(type(root).forward).bind(root, *call.args, **call.kwargs)
        bound.apply_defaults()
        by_name = dict(bound.arguments) | by_name
    names = [str(placeholder.target) for placeholder in graph.find_nodes(op="placeholder")]
    inputs = [by_name[name if name in by_name else re.sub(r"_1$", "", name)] for name in names]
    with torch.no_grad(), fixed_randomness():
        return fx.Interpreter(copy_with_tensors(root), graph=graph).run(*inputs)
