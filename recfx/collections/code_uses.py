"""Whether code takes nothing that it could call from what it reads: it counts, compares, stores, or takes data.

This is read off the source. What has no source, or is used in any way that is not listed here, may be called.
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch

from recfx.collections.object_kinds import WEAK_CONTAINERS, is_users

# These types exactly, so that no method of the user's runs; and not None, which may stand for what is set later.
_CONTAINERS = (
    dict, list, set, frozenset, tuple, collections.deque, collections.OrderedDict, collections.defaultdict,
    collections.Counter, *WEAK_CONTAINERS,
)  # fmt: skip
_DATA = (int, float, complex, str, bytes, torch.Tensor, torch.device, torch.dtype)
# What they return is dropped where the call is a statement.
_STORE = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
_UNKNOWN = object()


def takes_nothing(name: str, value: Any, functions: Iterable[types.FunctionType], *, attribute: bool) -> bool:
    """Whether none of these functions takes anything from ``value`` that might be called.

    Args:
        name: the name by which the functions read it.
        value: what they read: neither data nor None.
        functions: all functions that may read it.
        attribute: it is read as an attribute of that name, of whatever object; otherwise it is a global.
    """
    readers = [
        function
        for function in functions
        if name in names_used(function.__code__) and (attribute or function.__globals__.get(name) is value)
    ]
    return bool(readers) and all(_takes_nothing(name, value, function, attribute) for function in readers)


@functools.lru_cache(maxsize=4096)
def names_used(code: types.CodeType) -> tuple[str, ...]:
    """Every attribute and global that a piece of code names, including functions inside it."""
    inside = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return (*code.co_names, *(name for each in inside for name in names_used(each)))


def _takes_nothing(name: str, value: Any, function: types.FunctionType, attribute: bool) -> bool:
    body = _body_of(function)
    if any(isinstance(node, ast.Constant) and node.value == name for node in body):  # getattr(self, "name")
        return False
    reads = [node for node in body if _is_load_of(node, name, attribute)]
    uses = _Uses(function, body)
    return bool(reads) and all(uses.take_nothing(node, value) for node in reads)


def _body_of(function: types.FunctionType) -> list[ast.AST]:
    """The syntax of what a function runs; empty if there is no source of exactly this code."""
    try:
        lines, _ = inspect.findsource(function)
        tree, codes = _parsed("".join(lines), function.__code__.co_filename)
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    if function.__code__ not in codes:  # the file is another one by now
        return []
    return [
        inside
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name == function.__code__.co_name
        and min(part.lineno for part in (node, *node.decorator_list)) == function.__code__.co_firstlineno
        for statement in node.body
        for inside in ast.walk(statement)
    ]


@functools.lru_cache(maxsize=8)  # a model's code is in few files
def _parsed(text: str, file: str) -> tuple[ast.Module, list[types.CodeType]]:
    return ast.parse(text), list(_codes_in(compile(text, file, "exec", dont_inherit=True)))


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes_in(const)


def _is_load_of(node: ast.AST, name: str, attribute: bool = False) -> TypeGuard[ast.expr]:
    if attribute:
        return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


class _Uses:
    """How one function uses what it reads."""

    def __init__(self, function: types.FunctionType, body: list[ast.AST]) -> None:
        self._function, self._body = function, body
        self._above = {child: node for node in body for child in ast.iter_child_nodes(node)}

    def take_nothing(self, node: ast.expr, value: Any) -> bool:
        """Whether what the function does with ``value``, which it reads at ``node``, takes only data from it."""
        if isinstance(value, _DATA):
            return True
        above = self._above.get(node)
        if isinstance(above, (ast.Attribute, ast.Subscript)) and above.value is node:
            if not isinstance(above.ctx, ast.Load):
                return self._stores(above, value)
            return self._calls_to_store(above, value) or self.take_nothing(above, _part(value, above))
        if isinstance(above, ast.Compare) and len(above.ops) == 1:
            if isinstance(above.ops[0], (ast.Is, ast.IsNot)):
                return True
            return (
                type(value) in _CONTAINERS and node is not above.left and isinstance(above.ops[0], (ast.In, ast.NotIn))
            )
        return type(value) in _CONTAINERS and (
            (isinstance(above, (ast.If, ast.While, ast.IfExp)) and above.test is node)
            or (isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not))
            or (isinstance(above, ast.Call) and above.args == [node] and self._is_len(above.func))
            or (isinstance(above, (ast.For, ast.comprehension)) and above.iter is node and self._drops(above.target))
        )

    def _stores(self, target: ast.Attribute | ast.Subscript, value: Any) -> bool:
        if isinstance(self._above.get(target), ast.AugAssign):  # which also calls a method of what stands there
            part = _part(value, target)
            if not isinstance(part, _DATA) and type(part) not in _CONTAINERS:
                return False
        if isinstance(target, ast.Subscript):
            return type(value) in _CONTAINERS
        described = inspect.getattr_static(type(value), target.attr, None)
        return not hasattr(described, "__set__") and not _has_own(value, "__setattr__", "__delattr__")

    def _calls_to_store(self, method: ast.Attribute | ast.Subscript, value: Any) -> bool:
        call = self._above.get(method)
        return (
            type(value) in _CONTAINERS
            and isinstance(method, ast.Attribute)
            and method.attr in _STORE
            and isinstance(call, ast.Call)
            and call.func is method
            and isinstance(self._above.get(call), ast.Expr)
        )

    def _is_len(self, node: ast.expr) -> bool:
        known = self._function.__globals__, self._function.__code__.co_freevars, self._function.__code__.co_varnames
        return _is_load_of(node, "len") and not any("len" in names for names in known) and not self._binds("len")

    def _drops(self, target: ast.expr) -> bool:
        """Whether nothing reads the variable of a loop."""
        return isinstance(target, ast.Name) and not any(
            _is_load_of(node, target.id) or (isinstance(node, (ast.Global, ast.Nonlocal)) and target.id in node.names)
            for node in self._body
        )

    def _binds(self, name: str) -> bool:
        return any(
            (isinstance(node, ast.arg) and node.arg == name)
            or (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load))
            or (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name)
            for node in self._body
        )


def _part(value: Any, node: ast.Attribute | ast.Subscript) -> Any:
    """What stands in ``value`` under a constant key or in a plain attribute; ``_UNKNOWN`` for all else."""
    if isinstance(node, ast.Attribute):
        found = _UNKNOWN if _has_own(value, "__getattribute__") else inspect.getattr_static(value, node.attr, _UNKNOWN)
        return _UNKNOWN if hasattr(type(found), "__get__") else found
    if type(value) in _CONTAINERS and isinstance(node.slice, ast.Constant):
        if isinstance(value, dict):
            return value.get(node.slice.value, _UNKNOWN)
        if isinstance(value, (list, tuple)) and isinstance(node.slice.value, int) and node.slice.value < len(value):
            return value[node.slice.value]
    return _UNKNOWN


def _has_own(value: Any, *methods: str) -> bool:
    """Whether ``value`` is not simply an object of the user's, a class or a file, or overrides one of these methods."""
    kind = type(value)
    if not is_users(kind.__module__) and not isinstance(value, (type, types.ModuleType, types.SimpleNamespace)):
        return True
    return any(method in vars(base) for base in kind.__mro__ if is_users(base.__module__) for method in methods)
