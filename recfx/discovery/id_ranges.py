"""Value-range analysis: in which range the ids are that a traced model passes to a collection, and why.

Ids may be int32 unless the model makes them int64. What no rule is about has no known range, and neither have ids that
may be changed in place, nor the values of parameters and buffers that a ``state_dict`` may replace. The graph is one of
a sample; whoever relies on a range checks it in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx, nn
from torch.utils._sympy.value_ranges import ValueRanges

from recfx.discovery.in_place import ancestors, is_in_place, may_change_its_arguments, same_memory
from recfx.discovery.known_values import INT64, Features, Ids, of_attribute, of_input, within
from recfx.discovery.operator_names import name_of
from recfx.discovery.range_rules import RULES
from recfx.ir.tables import IdRange


class IdRanges:
    """The ranges of one traced graph.

    Args:
        graph: the graph.
        root: the module that it was traced from.
        inputs: the sample's values, by name of the placeholder: what is an integer tensor or a batch of ids.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.root, self._inputs = root, inputs
        self._known: dict[fx.Node, Any] = {}
        self._changed = [ancestors(node) for node in graph.nodes if is_in_place(node)]
        self._given_away: set[fx.Node] = set()
        for node in graph.nodes:
            if may_change_its_arguments(node, root):
                self._given_away.update(*(same_memory(given) for given in node.all_input_nodes))

    def of_call(self, call: fx.Node, features: Iterable[str]) -> dict[str, IdRange]:
        """The ranges of the features that a call of a collection reads; those that are not known are left out."""
        given = [*call.args, *call.kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], fx.Node):
            return {}
        before = ancestors(given[0])
        if any(before & changed for changed in self._changed):
            return {}  # something that the ids are made of is changed in place
        if self._given_away & same_memory(given[0]):
            return {}  # code that the trace does not see has the ids, and may change them in place
        batch = self.of(given[0])
        found = {}
        for feature in features if isinstance(batch, Features) else ():
            ids = batch.of(feature)
            if ids is not None and not within(INT64, ids.range):
                found[feature] = IdRange(int(ids.range.lower), int(ids.range.upper), ", then ".join(ids.why))
        return found

    def of(self, node: Any) -> Any:
        """What is known of a node's value; see ``Values.of``."""
        if isinstance(node, int) and not isinstance(node, bool):
            return Ids(ValueRanges.wrap(node), (), True)
        if not isinstance(node, fx.Node):
            return None
        pending = [node]
        while pending:  # not recursive, because graphs may be deep
            last = pending[-1]
            missing = [each for each in last.all_input_nodes if each not in self._known]
            if missing:
                pending += missing
            else:
                pending.pop()
                if last not in self._known:
                    self._known[last] = self._evaluate(last)
        return self._known[node]

    def _evaluate(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return of_input(self._inputs.get(str(node.target)))
        if node.op == "get_attr":
            return of_attribute(self.root, str(node.target))
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            return self.of(node.args[0]) if type(module) in (nn.Identity, nn.Flatten) and node.args else None
        rule = RULES.get(name_of(node))
        return None if rule is None else rule(self, node)
