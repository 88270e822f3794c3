"""What kernels that read rows of tables do per row, as Ascend's compilers make it: counted, not timed.

The figures are in ``row_work.txt``, one line per compiled form, version of the compiler and unit of work. They are
written by ``python -m tests.tools.ascend.row_work``, and ``tests/ascend`` compares them with what is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("row_work.txt")


@dataclass(frozen=True)
class RowWork:
    """What a core does for one row that it reads, or beyond its rows for one bag, or for one row that it steps.

    Args:
        copies: of rows, into the unified buffer.
        stores: of rows, out of it.
        bytes: that both move, where rows are as wide as the block.
        operations: on scalars; what does not change within a loop is not counted in it.
        divisions: those of them that divide.
        loads: of scalars from memory.
        lines: of 64 bytes that these loads touch first.
        vectors: operations on vectors of the width of the block.
        waits: for another unit, or for the unit's own instructions.
        stops: waits in which the scalar unit stands still, so that it hands out nothing.
        series: latencies of copies that follow one another, because the next begins when the one before is there.
        queued: copies that begin one after the other before such a latency.
        chained: operations on vectors between such latencies, one after the other.
        waited: waits between them.
    """

    copies: float = 0.0
    stores: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0
    divisions: float = 0.0
    loads: float = 0.0
    lines: float = 0.0
    vectors: float = 0.0
    waits: float = 0.0
    stops: float = 0.0
    series: float = 0.0
    queued: float = 0.0
    chained: float = 0.0
    waited: float = 0.0

    def plus(self, other: RowWork, times: float) -> RowWork:
        """This work, and the other so many times."""
        return RowWork(*(own + times * its for own, its in zip(astuple(self), astuple(other), strict=True)))

    @property
    def rows_in_flight(self) -> float:
        """How many rows are on their way at once, if nothing else takes time."""
        return self.copies / self.series if self.series else float("inf")


FIGURES = tuple(field.name for field in fields(RowWork))


@dataclass(frozen=True, order=True)
class Form:
    """A kernel as it was compiled.

    Args:
        kernel: the Triton function.
        rule: of an optimizer; ``""``: none.
        elements: the type of the tables' elements.
        block: columns.
        flags: such as ``weighted``, joined by ``+``; ``""``: none.
    """

    kernel: str
    rule: str
    elements: str
    block: int
    flags: str


@dataclass(frozen=True)
class FormWork:
    """What one version of the compiler makes of a form.

    Args:
        compiler: the version of ascendnpu-ir.
        row: per row that is read.
        more: beyond its rows, per bag, or per row that is stepped.
    """

    compiler: str
    row: RowWork
    more: RowWork


@cache
def row_work(file: Path = FILE) -> Mapping[Form, tuple[FormWork, ...]]:
    """What was counted, by form; one entry per version of the compiler."""
    counted: dict[Form, dict[str, dict[str, RowWork]]] = {}
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            continue
        kernel, rule, elements, block, flags, compiler, per, *figures = line.split()
        form = Form(kernel, rule.strip("-"), elements, int(block), flags.strip("-"))
        counted.setdefault(form, {}).setdefault(compiler, {})[per] = RowWork(*map(float, figures))
    return {
        form: tuple(FormWork(compiler, works.pop("row"), *works.values()) for compiler, works in of_compilers.items())
        for form, of_compilers in counted.items()
    }
