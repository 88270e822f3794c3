"""What code reads without getting it as an argument, and whether it takes anything from it that it could call.

Globals, and attributes, closures and defaults of classes belong to every model of the class, so a conversion of one
model cannot change them. How they are used is read off the source: code that only counts, compares, stores, or takes
data is harmless. What has no source, or is used in a way that is not listed here, may be called.
"""

from __future__ import annotations

import ast
import collections
import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from recfx.collections.object_kinds import WEAK_CONTAINERS, Edge, edges_of, is_atom, is_users

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
    return (*code.co_names, *(name for function in inside for name in names_used(function)))


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
        part = _UNKNOWN if _has_own(value, "__getattribute__") else inspect.getattr_static(value, node.attr, _UNKNOWN)
        return _UNKNOWN if hasattr(type(part), "__get__") else part
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


# Methods that a forward does not run.
_SETUP = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__", "__repr__", "__str__"})


@dataclass(eq=False)
class CodeReads:
    """One thing that code reads: what it is and which code reads it, the thing itself, and the global or attribute by
    whose name it is read (``""`` for variables of functions).
    """

    why: str
    edges: list[Edge]
    name: str = ""
    attribute: bool = False


def owner_of_code(value: Any) -> Any:
    """What owns the code that runs when ``value`` is used: a function, or the class of a module or helper; or None."""
    if type(value) is types.FunctionType:
        return value if is_users(value.__module__) else None
    return type(value) if is_users(type(value).__module__) else None


def functions_of(owner: Any) -> list[types.FunctionType]:
    """The function itself, or the functions of a class that a forward can run."""
    if isinstance(owner, types.FunctionType):
        return [owner]
    return [function for _, _, member in _members_used(owner) for function in _functions(member)]


def reads_of(owner: Any) -> list[CodeReads]:
    """What is read by the code of a function, or by the code of a class that a forward can run."""
    if isinstance(owner, types.FunctionType):
        return list(_globals_read(owner, owner.__qualname__))
    reads = []
    for kind, name, member in _members_used(owner):
        functions = list(_functions(member))
        for function in functions:
            where = f"{kind.__name__}.{name}"
            reads += list(_globals_read(function, where))
            reads += [CodeReads(f"{where}{label}", [("", value)]) for label, value in edges_of(function)]
        if not functions and not is_atom(member):
            why = f"the attribute {name!r} of the class {kind.__name__}"
            reads.append(CodeReads(why, [("", member)], name, attribute=True))
    return reads


def _members_used(kind: type[Any]) -> Iterator[tuple[type[Any], str, Any]]:
    """Members of the user's classes that calling an instance may use, judged by their names."""
    classes = [base for base in kind.__mro__ if is_users(base.__module__)]
    if issubclass(kind, nn.Module):
        waiting, seen = ["forward", "__call__", "__getattr__"], set[str]()
    else:
        waiting, seen = [name for base in classes for name in base.__dict__ if name not in _SETUP], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for base in classes:
            if name in base.__dict__:
                member = base.__dict__[name]
                yield base, name, member
                for function in _functions(member):
                    waiting += names_used(function.__code__)


def _functions(member: Any) -> Iterator[types.FunctionType]:
    if isinstance(member, types.FunctionType):
        yield member
    elif isinstance(member, property):
        yield from (accessor for accessor in (member.fget, member.fset) if isinstance(accessor, types.FunctionType))
    elif isinstance(member, (staticmethod, classmethod)):
        yield from _functions(member.__func__)
    elif isinstance(member, (functools.cached_property, functools.partialmethod)):
        yield from _functions(member.func)


def _globals_read(function: types.FunctionType, where: str) -> Iterator[CodeReads]:
    for path in _paths_read(function.__code__):
        value = function.__globals__.get(path[0])
        read_as, attribute = path[0], False
        for name in path[1:]:
            # Attributes count only if the global is a module or a class: a value is searched as a whole.
            if isinstance(value, (types.ModuleType, type)):
                value = vars(value).get(name) if is_users(_module_name(value)) else None
                read_as, attribute = name, True
        if value is not None and not is_atom(value):
            why = f"the global {'.'.join(path)!r}, which {where} reads"
            yield CodeReads(why, [("", value)], read_as, attribute)


def _module_name(value: types.ModuleType | type[Any]) -> str:
    return value.__name__ if isinstance(value, types.ModuleType) else value.__module__


@functools.lru_cache(maxsize=4096)
def _paths_read(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Globals that a piece of code reads, each with the attributes that it reads from them directly."""
    paths: list[tuple[str, ...]] = []
    before: str | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            before = str(instruction.argval)
            paths.append((before,))
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before is not None:
            paths[-1] = (before, str(instruction.argval))
            before = None
        elif instruction.opname not in ("CACHE", "PRECALL", "PUSH_NULL"):
            before = None
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            paths += _paths_read(const)
    return tuple(dict.fromkeys(paths))
