"""Value-range analysis: in which range the ids are that a traced model passes to a collection, and why.

Every rule is about integer tensors, and says what torch does: ``%`` and ``remainder`` have the sign of the divisor,
``fmod`` has that of the dividend, and a result that does not fit into the tensor's type wraps around, so nothing is
known of it. Ids may be int32 unless the model makes them int64. What no rule is about has no known range, and neither
have ids that may be changed in place, nor the values of parameters and buffers that a ``state_dict`` may replace. The
graph is one of a sample; whoever relies on a range checks it in every batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis as Analysis
from torch.utils._sympy.value_ranges import ValueRanges
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.ir.id_range import IdRange
from recfx.tracing.shallow_tracer import source_of

_INT32 = ValueRanges(-(2**31), 2**31 - 1)
_INT64 = ValueRanges(-(2**63), 2**63 - 1)
_Range = Any  # a ValueRanges of integers; torch's own class is not typed for that


@dataclass(frozen=True)
class _Ids:
    """An integer tensor.

    Args:
        range: of its values.
        why: what made them so.
        is_int64: whether its type is known to be int64; otherwise it may be int32. True for a number, which takes the
            type of the tensor that it meets.
    """

    range: _Range
    why: tuple[str, ...] = ()
    is_int64: bool = False


@dataclass(frozen=True)
class _Features:
    """A ``KeyedJaggedTensor``: its ids by key; under None those of all keys that are not named."""

    by_key: Mapping[str | None, _Ids]

    def of(self, key: str) -> _Ids | None:
        return self.by_key.get(key, self.by_key.get(None))


@dataclass(frozen=True)
class _Object:
    """Anything else that the model was called with."""

    value: Any


class IdRanges:
    """The ranges of one traced graph.

    Args:
        graph: the graph.
        root: the module that it was traced from.
        inputs: the sample's values, by name of the placeholder: what is an integer tensor or a batch of ids.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, inputs: Mapping[str, Any]) -> None:
        self._root, self._inputs = root, inputs
        self._known: dict[fx.Node, Any] = {}
        self._changed = [_ancestors(node) for node in graph.nodes if _is_in_place(node)]
        self._given_away: set[fx.Node] = set()
        for node in graph.nodes:
            if _may_change_its_arguments(node, root):
                self._given_away.update(*(_same_memory(given) for given in node.all_input_nodes))

    def of_call(self, call: fx.Node, features: Iterable[str]) -> dict[str, IdRange]:
        """The ranges of the features that a call of a collection reads; those that are not known are left out."""
        given = [*call.args, *call.kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], fx.Node):
            return {}
        before = _ancestors(given[0])
        if any(before & changed for changed in self._changed):
            return {}  # something that the ids are made of is changed in place
        if self._given_away & _same_memory(given[0]):
            return {}  # code that the trace does not see has the ids, and may change them in place
        batch = self._value(given[0])
        found = {}
        for feature in features if isinstance(batch, _Features) else ():
            ids = batch.of(feature)
            if ids is not None and not _within(_INT64, ids.range):
                found[feature] = IdRange(int(ids.range.lower), int(ids.range.upper), ", then ".join(ids.why))
        return found

    def _value(self, node: Any) -> Any:
        """What is known of a node's value: ``_Ids``, ``_Features``, or None for nothing."""
        if isinstance(node, int) and not isinstance(node, bool):
            return _Ids(ValueRanges.wrap(node), (), True)
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
            return _of_input(self._inputs.get(str(node.target)))
        if node.op == "get_attr":
            return _of_attribute(self._root, str(node.target))
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            return self._value(node.args[0]) if type(module) in (nn.Identity, nn.Flatten) and node.args else None
        rule = _RULES.get(_name_of(node))
        return None if rule is None else rule(self, node)

    # Rules; each takes the node, whose first argument is the tensor.

    def _operands(self, node: fx.Node, names: tuple[str, ...]) -> list[Any] | None:
        """The arguments by position or name, None where one is missing; None if there are others."""
        if len(node.args) > len(names) or set(node.kwargs) - set(names[len(node.args) :]):
            return None
        return [*node.args, *(node.kwargs.get(name) for name in names[len(node.args) :])]

    def _remainder(self, node: fx.Node) -> _Ids | None:
        found = self._ids_and_constant(node)
        if found is None or found[1] == 0:
            return None
        ids, divisor = found
        positive = divisor > 0
        after = Analysis.python_mod(ids.range, ValueRanges.wrap(divisor)) if positive else ValueRanges(divisor + 1, 0)
        return _made(ids, after, f"% {divisor}", node)

    def _fmod(self, node: fx.Node) -> _Ids | None:
        found = self._ids_and_constant(node)
        if found is None or found[1] == 0:
            return None
        ids, most = found[0], abs(found[1]) - 1
        lower = 0 if ids.range.lower >= 0 else max(-most, int(ids.range.lower))
        upper = 0 if ids.range.upper <= 0 else min(most, int(ids.range.upper))
        return _made(ids, ValueRanges(lower, upper), f"fmod {found[1]}", node)

    def _clamp(self, node: fx.Node) -> _Ids | None:
        name = str(node.target if node.op == "call_method" else _FUNCTIONS[node.target])
        names = {"clamp_min": ("input", "min"), "clamp_max": ("input", "max")}.get(name, ("input", "min", "max"))
        given = self._operands(node, names)
        ids = None if given is None else self._value(given[0])
        if given is None or not isinstance(ids, _Ids):
            return None
        bounds = dict(zip(names[1:], given[1:], strict=True))
        lowest, highest = bounds.get("min"), bounds.get("max")
        if any(bound is not None and type(bound) is not int for bound in (lowest, highest)):
            return None
        after = ids.range if lowest is None else Analysis.maximum(ids.range, ValueRanges.wrap(lowest))
        after = after if highest is None else Analysis.minimum(after, ValueRanges.wrap(highest))  # the maximum wins
        words = [f"{word}={bound}" for word, bound in (("min", lowest), ("max", highest)) if bound is not None]
        return _made(ids, after, f"clamp({', '.join(words)})", node)

    def _arithmetic(self, compute: Callable[..., _Range], sign: str) -> Callable[[fx.Node], _Ids | None]:
        def rule(node: fx.Node) -> _Ids | None:
            given = self._operands(node, ("input", "other"))
            sides = None if given is None else [self._value(each) for each in given]
            if sides is None or not all(isinstance(each, _Ids) for each in sides):
                return None
            left, right = sides
            is_int64 = left.is_int64 and right.is_int64
            after = compute(left.range, right.range)
            if not _within(after, _INT64 if is_int64 else _INT32):
                return None  # it may wrap around
            other = str(given[1]) if given is not None and not isinstance(given[1], fx.Node) else "another"
            return _made(replace(left, why=left.why + right.why, is_int64=is_int64), after, f"{sign} {other}", node)

        return rule

    def _floor_divide(self, node: fx.Node) -> _Ids | None:
        found = self._ids_and_constant(node)
        if found is None or found[1] <= 0:
            return None
        return _made(found[0], Analysis.floordiv(found[0].range, ValueRanges.wrap(found[1])), f"// {found[1]}", node)

    def _bitwise_and(self, node: fx.Node) -> _Ids | None:
        found = self._ids_and_constant(node)
        if found is None or found[1] < 0:
            return None
        upper = found[1] if found[0].range.lower < 0 else min(found[1], int(found[0].range.upper))
        return _made(found[0], ValueRanges(0, upper), f"& {found[1]}", node)

    def _abs(self, node: fx.Node) -> _Ids | None:
        ids = self._value(_first(node))
        if not isinstance(ids, _Ids):
            return None
        after = Analysis.abs(ids.range)  # of the lowest number there is, abs is that number itself
        return _made(ids, after, "abs", node) if _within(after, _INT64 if ids.is_int64 else _INT32) else None

    def _either(self, node: fx.Node) -> _Ids | None:
        """``cat`` and ``stack`` of tensors, ``where`` of two."""
        is_where = node.target is torch.where
        if is_where and (len(node.args) != 3 or node.kwargs):
            return None
        parts = node.args[1:] if is_where else node.args[0] if node.args else ()
        found = [self._value(each) for each in parts] if isinstance(parts, (tuple, list)) else []
        if not found or not all(isinstance(each, _Ids) for each in found):
            return None
        lower, upper = min(each.range.lower for each in found), max(each.range.upper for each in found)
        why = dict.fromkeys(" then ".join(each.why) for each in found if each.why)
        is_int64 = all(each.is_int64 for each in found)
        return _Ids(ValueRanges(lower, upper), (" or ".join(why),) if why else (), is_int64)

    def _extreme(self, compute: Callable[..., _Range], name: str) -> Callable[[fx.Node], _Ids | None]:
        def rule(node: fx.Node) -> _Ids | None:
            sides = [self._value(each) for each in node.args]
            if len(sides) != 2 or node.kwargs or not all(isinstance(each, _Ids) for each in sides):
                return None
            left, right = sides
            both = replace(left, why=left.why + right.why, is_int64=left.is_int64 and right.is_int64)
            return _made(both, compute(left.range, right.range), name, node)

        return rule

    def _bucketize(self, node: fx.Node) -> _Ids | None:
        name, place = ("boundaries", 1) if node.target is torch.bucketize else ("sorted_sequence", 0)
        boundaries = node.args[place] if len(node.args) > place else node.kwargs.get(name)
        tensor = _attribute(self._root, boundaries)
        if tensor is None or tensor.dim() != 1:
            return None
        return _made(_Ids(_INT64, (), False), ValueRanges(0, tensor.numel()), f"{tensor.numel()} boundaries", node)

    def _look_up(self, node: fx.Node) -> Any:
        """``x[...]``, or a row of an integer table, or the ids of one key."""
        given = self._value(_first(node))
        if isinstance(given, _Features):
            return given.of(node.args[1]) if isinstance(node.args[1], str) else None
        return given if isinstance(given, _Ids) else None

    def _embedding(self, node: fx.Node) -> Any:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        given = self._operands(node, names)
        return None if given is None or given[3] is not None else self._value(given[1])

    def _same(self, node: fx.Node) -> Any:
        reinterprets = any(isinstance(each, torch.dtype) for each in (*node.args, *node.kwargs.values()))
        return None if reinterprets else self._value(_first(node))

    def _attribute_of(self, node: fx.Node) -> Any:
        """A field of an object that the model was called with."""
        given = self._value(_first(node))
        fields = getattr(given.value, "__dict__", {}) if isinstance(given, _Object) else {}
        return _of_input(fields.get(node.args[1]))

    def _to(self, node: fx.Node) -> Any:
        wanted = [each for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, torch.dtype)]
        given = self._value(_first(node))
        if any(isinstance(each, fx.Node) for each in (*node.args[1:], *node.kwargs.values())):
            return None  # the type of another tensor
        return _cast(given, wanted[0]) if wanted else given

    def _long(self, node: fx.Node) -> Any:
        return _cast(self._value(_first(node)), torch.int64)

    def _int(self, node: fx.Node) -> Any:
        return _cast(self._value(_first(node)), torch.int32)

    def _all_values(self, node: fx.Node) -> _Ids | None:
        given = self._value(_first(node))
        if isinstance(given, _Ids):  # of a JaggedTensor
            return given
        if not isinstance(given, _Features):
            return None
        parts = list(given.by_key.values())
        lower, upper = min(each.range.lower for each in parts), max(each.range.upper for each in parts)
        why = dict.fromkeys(" then ".join(each.why) for each in parts if each.why)
        return _Ids(ValueRanges(lower, upper), (" or ".join(why),) if why else (), all(each.is_int64 for each in parts))

    def _make_features(self, node: fx.Node) -> _Features | None:
        keys = node.args[0] if node.args else node.kwargs.get("keys")
        ids = self._value(node.args[1] if len(node.args) > 1 else node.kwargs.get("values"))
        if not isinstance(ids, _Ids):
            return None
        if isinstance(keys, (list, tuple)) and all(isinstance(key, str) for key in keys):
            return _Features({str(key): ids for key in keys})
        return _Features({None: ids})

    def _make_jagged(self, node: fx.Node) -> Any:
        return self._value(node.args[0] if node.args else node.kwargs.get("values"))

    def _ids_and_constant(self, node: fx.Node) -> tuple[_Ids, int] | None:
        given = self._operands(node, ("input", "other"))
        if given is None or type(given[1]) is not int:
            return None
        ids = self._value(given[0])
        return (ids, given[1]) if isinstance(ids, _Ids) and isinstance(given[0], fx.Node) else None


def _made(before: _Ids, after: _Range, what: str, node: fx.Node) -> _Ids:
    """The value of a rule that narrows or moves a range, with what it did and where."""
    site = source_of(node)
    return replace(before, range=after, why=(*before.why, f"{what} ({site})" if site else what))


def _within(inner: _Range, outer: _Range) -> bool:
    return bool(outer.lower <= inner.lower and inner.upper <= outer.upper)


def _cast(given: Any, dtype: torch.dtype) -> Any:
    if not isinstance(given, _Ids):
        return None
    if dtype == torch.int64:
        return replace(given, is_int64=True)
    if dtype == torch.int32:
        fits = _within(given.range, _INT32)  # otherwise it wraps around
        return replace(given, is_int64=False) if fits else _Ids(_INT32, ("int32",), False)
    return None


def _of_input(value: Any) -> Any:
    """What is known of an input: its types alone."""
    if isinstance(value, KeyedJaggedTensor):
        return _Features({None: _Ids(_INT64)}) if _is_integer(value.values()) else None
    if isinstance(value, JaggedTensor):
        value = value.values()
    if isinstance(value, torch.Tensor):
        return _Ids(_INT64) if _is_integer(value) else None
    return _Object(value)


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _attribute(root: nn.Module, node: Any) -> torch.Tensor | None:
    """The tensor that a ``get_attr`` node reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found: Any = root
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch.Tensor) else None


def _of_attribute(root: nn.Module, path: str) -> _Ids | None:
    owner, _, name = path.rpartition(".")
    holder: Any = root
    for part in owner.split(".") if owner else ():
        holder = getattr(holder, part, None)
    found = getattr(holder, name, None)
    if not isinstance(found, torch.Tensor) or not _is_integer(found):
        return None
    if found.is_meta or not found.numel() or _is_in_state_dict(holder, name):
        return _Ids(_INT64, (), found.dtype == torch.int64)
    lower, upper = (int(each) for each in torch.aminmax(found))
    return _Ids(ValueRanges(lower, upper), (f"values of {path}",), found.dtype == torch.int64)


def _is_in_state_dict(module: Any, name: str) -> bool:
    if not isinstance(module, nn.Module):
        return False
    return name in module._parameters or name in module._buffers.keys() - module._non_persistent_buffers_set


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The node, and everything that its value is made of."""
    found, pending = {node}, [node]
    while pending:
        for each in pending.pop().all_input_nodes:
            if each not in found:
                found.add(each)
                pending.append(each)
    return found


def _is_in_place(node: fx.Node) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    schema = getattr(node.target, "_schema", None)  # of an operator such as torch.ops.aten.add_.Tensor
    if schema is not None:
        return bool(schema.is_mutable)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__") and node.target is not operator.and_
    return writes or name in _WRITING or bool(node.kwargs.get("inplace")) or node.kwargs.get("out") is not None


_WRITING = {
    "setitem",
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "mod", "floordiv", "and", "or", "xor", "pow", "lshift")),
    "irshift",
}


def _may_change_its_arguments(node: fx.Node, root: nn.Module) -> bool:
    """Whether it is code that the trace does not enter, a module or a function, and that nothing is known of."""
    if node.op == "call_module":
        return not all(_only_reads(each) for each in root.get_submodule(str(node.target)).modules())
    if node.op != "call_function" or node.target in _FUNCTIONS:
        return False
    module = getattr(node.target, "__module__", None)  # functions that are written in C++ have none
    return module is not None and module.split(".")[0] not in _LIBRARIES


def _only_reads(module: nn.Module) -> bool:
    is_graph = isinstance(module, (fx.GraphModule, torch.jit.ScriptModule))
    inplace = getattr(module, "inplace", False)
    return type(module).__module__.split(".")[0] in _LIBRARIES and not is_graph and not inplace


_LIBRARIES = {"torch", "torchrec", "recfx", "_operator", "builtins", "math"}


def _first(node: fx.Node) -> Any:
    """The tensor that a call is about."""
    return node.args[0] if node.args else node.kwargs.get("input")


def _same_memory(node: Any) -> set[fx.Node]:
    """The node, and the values in whose memory its ids may be."""
    found: set[fx.Node] = set()
    while isinstance(node, fx.Node) and node not in found:
        found.add(node)
        if node.target in _MAKERS:
            place = _MAKERS[node.target]
            node = node.args[place] if len(node.args) > place else node.kwargs.get("values")
        elif node.op == "call_module" or _name_of(node) in _VIEWS:
            node = _first(node)
        else:
            break
    return found


def _name_of(node: fx.Node) -> str:
    """The name of the rule for a call, if there is one."""
    return str(node.target) if node.op == "call_method" else _FUNCTIONS.get(node.target, "")


_MAKERS: dict[Any, int] = {KeyedJaggedTensor: 1, JaggedTensor: 0}
"""The classes of batches of ids, and the place of the ids among the arguments."""


_FUNCTIONS: dict[Any, str] = {
    operator.mod: "remainder",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floor_divide",
    operator.and_: "bitwise_and",
    operator.getitem: "getitem",
    getattr: "getattr",
    nn.functional.embedding: "embedding",
    KeyedJaggedTensor: "KeyedJaggedTensor",
    JaggedTensor: "JaggedTensor",
    torch.concat: "cat",
    torch.clip: "clamp",
    **{
        getattr(torch, name): name
        for name in (
            "remainder", "fmod", "clamp", "clamp_min", "clamp_max", "add", "sub", "mul", "floor_divide", "bitwise_and",
            "abs", "cat", "stack", "where", "minimum", "maximum", "bucketize", "searchsorted", "flatten", "reshape",
            "squeeze", "unsqueeze",
        )
    },
}  # fmt: skip

_Rule = Callable[[IdRanges, fx.Node], Any]
_RULES: dict[str, _Rule] = {
    "remainder": IdRanges._remainder,
    "fmod": IdRanges._fmod,
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max"), IdRanges._clamp),
    "add": lambda self, node: self._arithmetic(Analysis.add, "+")(node),
    "sub": lambda self, node: self._arithmetic(_subtract, "-")(node),
    "mul": lambda self, node: self._arithmetic(Analysis.mul, "*")(node),
    "floor_divide": IdRanges._floor_divide,
    "bitwise_and": IdRanges._bitwise_and,
    "abs": IdRanges._abs,
    **dict.fromkeys(("cat", "stack", "where"), IdRanges._either),
    "minimum": lambda self, node: self._extreme(Analysis.minimum, "minimum")(node),
    "maximum": lambda self, node: self._extreme(Analysis.maximum, "maximum")(node),
    **dict.fromkeys(("bucketize", "searchsorted"), IdRanges._bucketize),
    "getitem": IdRanges._look_up,
    "embedding": IdRanges._embedding,
    "getattr": IdRanges._attribute_of,
    **dict.fromkeys(
        (
            "view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "detach", "clone", "permute", "t",
            "transpose", "expand", "repeat", "index_select", "cpu", "cuda", "sync",
        ),
        IdRanges._same,
    ),
    "to": IdRanges._to,
    "long": IdRanges._long,
    "int": IdRanges._int,
    "values": IdRanges._all_values,
    "KeyedJaggedTensor": IdRanges._make_features,
    "JaggedTensor": IdRanges._make_jagged,
}  # fmt: skip

_VIEWS = {name for name, rule in _RULES.items() if rule is IdRanges._same} | {
    "to", "long", "int", "values", "getitem", "getattr",
}  # fmt: skip
"""The rules of what may give back the memory that it was given."""


def _subtract(left: _Range, right: _Range) -> _Range:
    return ValueRanges(left.lower - right.upper, left.upper - right.lower)
