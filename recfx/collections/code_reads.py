"""What code reads without getting it as an argument: globals, and attributes, closures and defaults of classes.

They belong to every model of the class, so a conversion of one model cannot change them.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from recfx.collections.code_uses import names_used
from recfx.collections.object_kinds import Edge, edges_of, is_atom, is_users

# Methods that a forward does not run.
_SETUP = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__", "__repr__", "__str__"})


@dataclass(eq=False)
class CodeReads:
    """One thing that code reads.

    Args:
        why: what it is and which code reads it.
        edges: the thing itself.
        name: the global or the attribute by which it is read; ``""`` for variables of functions.
        attribute: it is read as an attribute.
    """

    why: str
    edges: list[Edge]
    name: str = ""
    attribute: bool = False


def owner_of_code(value: Any) -> Any:
    """What owns the code that runs when ``value`` is used: a function, or the class of a module or helper; or None."""
    if isinstance(value, types.FunctionType):
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
    found = []
    for kind, name, member in _members_used(owner):
        functions = list(_functions(member))
        for function in functions:
            where = f"{kind.__name__}.{name}"
            found += list(_globals_read(function, where))
            found += [CodeReads(f"{where}{label}", [("", value)]) for label, value in edges_of(function)]
        if not functions and not is_atom(member):
            why = f"the attribute {name!r} of the class {kind.__name__}"
            found.append(CodeReads(why, [("", member)], name, attribute=True))
    return found


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
        yield from (each for each in (member.fget, member.fset) if isinstance(each, types.FunctionType))
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
    found: list[tuple[str, ...]] = []
    before: str | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            before = str(instruction.argval)
            found.append((before,))
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before is not None:
            found[-1] = (before, str(instruction.argval))
            before = None
        elif instruction.opname not in ("CACHE", "PRECALL", "PUSH_NULL"):
            before = None
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found += _paths_read(const)
    return tuple(dict.fromkeys(found))
