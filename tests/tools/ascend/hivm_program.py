"""HIVM as a program that can be followed: what a vector core is told to do for given ids, in order.

Only scalars are computed, because they decide which loops and branches are taken: a compiled form is written out as a
function in Python, and that function tells a :class:`Core` what the text tells the chip. Vectors have sizes but no
contents, except integers that were copied from memory and are read one by one later.
"""

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

from tests.ascend.hivm import BYTES
from tests.tools.ascend.hivm_scalars import VALUE, Scalars, UnknownOperation, name_of, names_in, quotient, remainder


class Vector(NamedTuple):
    """A place in memory: of a parameter (by its name), or of the unified buffer (``""``).

    Args:
        memory: where.
        dtype: of one element.
        offset: elements from the beginning of the parameter, or bytes of the unified buffer.
        sizes: elements per axis.
    """

    memory: str
    dtype: str
    offset: int
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        return self.elements * BYTES[self.dtype]


class Core(Protocol):
    """What the program tells a vector core."""

    def scalars(self, operations: int, divisions: int) -> None: ...
    def scalar_load(self, place: Vector) -> Any: ...
    def scalar_store(self, value: Any, place: Vector) -> None: ...
    def copy_in(self, source: Vector, target: Vector) -> None: ...
    def copy_out(self, source: Vector, target: Vector) -> None: ...
    def vector(self, *operands: Any) -> None: ...
    def set_flag(self, source: str, target: str, event: int) -> None: ...
    def wait_flag(self, source: str, target: str, event: int) -> None: ...
    def barrier(self, pipe: str) -> None: ...


_IGNORED = ("annotation.", "hivm.hir.set_mask", "return")


def program_of(hivm: str) -> Callable[[Core, Sequence[Any]], None]:
    """The kernel of a compiled form.

    Returns:
        a function of a core and of the kernel's arguments: vectors and numbers, in the order of its parameters, and the
        three extents of the grid behind them. It does what program 0 does.

    Raises:
        UnknownOperation: there is an operation that this file does not know.
    """
    kernel = re.search(r"func\.func @\w+\((%arg0: i64 [^\n]*)\n(.*?)\n  }\n", hivm, re.S)
    if kernel is None:
        raise UnknownOperation("there is no kernel in this text")
    writer = _Writer(dict(re.findall(r"^#(\w+) = affine_map<(.*)>$", hivm, re.M)))
    for line in kernel[2].splitlines():
        writer.write(line.strip())
    own = re.findall(r"(%arg\d+): ", kernel[1])[3:]  # the compiler adds three in front
    unpacked = f"{', '.join(map(name_of, own))} = arguments"
    scope: dict[str, Any] = {"Vector": Vector, "part": _part, "quotient": quotient, "remainder": remainder}
    exec("\n".join(["def kernel(core, arguments):", f" {unpacked}", *writer.lines]), scope)
    return scope["kernel"]


def _part(of: Vector, offset: int, sizes: tuple[int, ...]) -> Vector:
    return Vector(of.memory, of.dtype, of.offset + offset * (1 if of.memory else BYTES[of.dtype]), sizes)


def _numbers(text: str) -> str:
    """The elements of ``[%1, 4]`` as a tuple in Python."""
    return (
        "("
        + "".join(f"{name_of(one) if one[0] == '%' else one}, " for one in re.findall(rf"{VALUE}|-?\d+", text))
        + ")"
    )


class _Writer(Scalars):
    """Writes the lines of HIVM in Python; regions become indented blocks."""

    def __init__(self, maps: dict[str, str]) -> None:
        super().__init__(maps)
        self.lines: list[str] = []
        self.regions: list[tuple[str, list[str], list[str]]] = []  # kind, results, the arguments of the next turn

    @property
    def depth(self) -> int:
        return sum(kind != "if" for kind, _, _ in self.regions)

    def write(self, line: str) -> None:
        left, equals, right = line.partition(" = ") if re.match(r"%[\w:-]+ = ", line) else ("", "", line)
        name, _, count = left.partition(":")
        targets = [name_of(f"{name}#{number}") for number in range(int(count))] if count else names_in(left)
        operation = re.split(r"[ (\[<{]", right, maxsplit=1)[0]
        self.depths |= dict.fromkeys(targets, self.depth)
        if right.startswith(_IGNORED):
            return
        if operation.startswith("scf.") or line[0] in "}^":
            self._flush()
            self._region(operation or line[:4], targets, right)
        elif operation.startswith("memref.") or operation in ("hivm.hir.pointer_cast", "hivm.hir.get_block_idx"):
            self._place(operation.rpartition(".")[2], targets, right)
        elif equals:
            self._put(f"{targets[0]} = {self.value(operation.rpartition('.')[2], targets[0], right)}")
        else:
            self._flush()
            self._tell(right)

    def _put(self, text: str) -> None:
        self.lines.append(" " * (1 + len(self.regions)) + text)

    def _flush(self) -> None:
        if self.operations:
            self._put(f"core.scalars({self.operations}, {self.divisions})")
        self.operations = self.divisions = 0

    def _assign(self, targets: list[str], values: list[str]) -> None:
        if targets:
            self._put(f"{', '.join(targets)} = {', '.join(values)}")

    def _region(self, operation: str, targets: list[str], right: str) -> None:
        if operation == "scf.for":
            bounds = re.match(
                rf"scf\.for ({VALUE}) = ({VALUE}) to ({VALUE}) step ({VALUE})(?: iter_args\((.*?)\) )?", right
            )
            assert bounds
            variable, first, last, step = map(name_of, bounds.groups()[:4])
            pairs = names_in(bounds[5] or "")
            self._assign(pairs[::2], pairs[1::2])
            self._assign(targets, pairs[::2])
            self._open("for", f"for {variable} in range({first}, {last}, {step}):", targets, pairs[::2])
            self.depths |= dict.fromkeys([variable, *pairs[::2]], self.depth)
            self.operations += 2
        elif operation == "scf.while":
            pairs = names_in(right.partition(" : ")[0])
            self._assign(pairs[::2], pairs[1::2])
            self._open("while", "while True:", targets, pairs[::2])
            self.depths |= dict.fromkeys(pairs[::2], self.depth)
        elif operation == "scf.if":
            self._open("if", f"if {names_in(right)[0]}:", targets, [])
        elif operation == "scf.condition":
            condition, *values = names_in(right.partition(" : ")[0])
            self._assign(self.regions[-1][1], values)
            self._put(f"if not {condition}: break")
        elif operation == "scf.yield":
            kind, results, arguments = self.regions[-1]
            self._assign(results if kind == "if" else arguments, names_in(right.partition(" : ")[0]))
            if kind == "for":
                self._assign(results, arguments)
        elif right.startswith("^bb0"):
            self._assign(names_in(right), self.regions[-1][1])
            self.depths |= dict.fromkeys(names_in(right), self.depth)
        elif right.startswith("} else"):
            kind, results, arguments = self._close()
            self._open(kind, "else:", results, arguments)
        elif not right.startswith("} do"):
            self._close()

    def _open(self, kind: str, text: str, results: list[str], arguments: list[str]) -> None:
        self._put(text)
        self.regions.append((kind, results, arguments))
        self.known.append({})
        self._put("pass")

    def _close(self) -> tuple[str, list[str], list[str]]:
        self.known.pop()
        return self.regions.pop()

    def _place(self, operation: str, targets: list[str], right: str) -> None:
        names = names_in(right.partition(" : ")[0])
        lists = re.findall(r"\[([^\]]*)\]", right.partition(" : ")[0])
        if operation == "get_block_idx":
            self._put(f"{targets[0]} = 0")
        elif operation == "pointer_cast":
            shape, dtype = re.search(r"memref<((?:\d+x)*)(\w+)", right).groups()  # type: ignore[union-attr]
            self._put(f"{targets[0]} = Vector('', {dtype!r}, {names[0]}, ({shape.replace('x', ', ')}))")
        elif operation == "reinterpret_cast":
            offset, sizes = _numbers(lists[0]), _numbers(lists[1])
            self._put(f"{targets[0]} = part({names[0]}, {offset}[0] - {names[0]}.offset, {sizes})")
        elif operation == "subview":
            self._put(f"{targets[0]} = part({names[0]}, {_numbers(lists[0])}[0], {_numbers(lists[1])})")
        elif operation in ("cast", "collapse_shape", "expand_shape"):
            self._put(f"{targets[0]} = {names[0]}")
        elif operation == "load":
            self._flush()
            self._put(f"{targets[0]} = core.scalar_load(part({names[0]}, {_numbers(lists[0])}[0], (1,)))")
        elif operation == "store":
            self._flush()
            self._put(f"core.scalar_store({names[0]}, part({names[1]}, {_numbers(lists[0])}[0], (1,)))")
        else:
            raise UnknownOperation(right)

    def _tell(self, right: str) -> None:
        pipes = re.findall(r"PIPE_(\w+)", right)
        operation = right.split("[")[0].rpartition(".")[2]
        if operation in ("set_flag", "wait_flag"):
            event = re.search(rf"EVENT_ID(\d+)|({VALUE})\]", right)
            assert event
            self._put(f"core.{operation}({pipes[0]!r}, {pipes[1]!r}, {event[1] or name_of(event[2])})")
        elif operation == "pipe_barrier":
            self._put(f"core.barrier({pipes[0]!r})")
        else:
            called = re.match(r"(?:hivm\.hir\.|(?:func\.)?call @)(\w+)", right)
            if called is None:
                raise UnknownOperation(right)
            texts = re.findall(r"(?:ins|outs)\(([^:)]*)", right) if "hir." in right else [right.partition(" : ")[0]]
            operands = [name for text in texts for name in names_in(text)]
            operands = (
                operands[1:] if "gather" in called[1] else operands
            )  # as many values are read as there are indices
            told = (
                "copy_in" if called[1].startswith("load") else "copy_out" if called[1].startswith("store") else "vector"
            )
            self._put(f"core.{told}({', '.join(operands if told == 'vector' else operands[:2])})")
