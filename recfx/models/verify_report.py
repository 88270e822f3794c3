"""The result of a verification: every comparison, and the largest differences by table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from recfx.errors import plural
from recfx.errors.grid import Grid
from recfx.errors.shown import Shown

Status: TypeAlias = Literal["equal", "different", "not_reproducible", "skipped"]
EQUAL, DIFFERENT, NOT_REPRODUCIBLE, SKIPPED = get_args(Status)
REFUSED_SAMPLE = "refused_sample"

_MOST_CHECKS, _MOST_TABLES = 10, 20
_KINDS = ("output", "gradient", "weight")


@dataclass(frozen=True)
class Check:
    """One comparison."""

    mode: str  # "train" or "eval"
    batch: str  # "sample", or "sample + 1" for the second batch size
    # outputs, gradients, parameters and buffers (after one step), run, or calls (only where an original is called)
    what: str
    # An output, parameter, input or collection. For a run that failed, the model that failed ("original", "converted"
    # or "refused_sample": converted, with an error of recfx), or what prevented the run ("copy", "sample", "meta").
    where: str
    status: Status  # not_reproducible: the original differs from itself
    largest: float = 0.0  # absolute difference
    message: str = ""  # what differs, or why it was skipped
    what_to_do: str = ""  # the advice of the error that stopped a run, if it has one


@dataclass(frozen=True, repr=False)
class VerifyReport(Shown):
    """What was compared. ``str()`` is a table of the largest differences; notebooks show one.

    Example:
        >>> model = Model()
        >>> print(recfx.verify(model, recfx.convert(model), sample))
        verification: ok (...
    """

    checks: tuple[Check, ...]  # every comparison
    # The largest differences by path of the collection, table and ``output``, ``gradient`` or ``weight``.
    tables: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    rtol: float = 1e-5  # relative tolerance used
    atol: float = 1e-6  # absolute tolerance used
    called: set[str] = field(default_factory=set)  # paths of the collections that a forward of the original calls

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differs. What is not reproducible does not count.

        Example:
            >>> model = Model()
            >>> recfx.verify(model, recfx.convert(model), sample).ok
            True
        """
        return bool(self.of(EQUAL)) and not self.of(DIFFERENT)

    def of(self, status: Status) -> list[Check]:
        """The checks that ended so: ``"equal"``, ``"different"``, ``"not_reproducible"`` or ``"skipped"``.

        Example:
            >>> model = Model()
            >>> recfx.verify(model, recfx.convert(model), sample).of("different")
            []
        """
        return [check for check in self.checks if check.status == status]

    def __repr__(self) -> str:
        return f"VerifyReport({self.as_grid().title.removeprefix('verification: ')})"

    def as_grid(self) -> Grid:
        """What is not equal, and the largest difference of each table that has one; ``str()`` and notebooks show it.

        Example:
            >>> model = Model()
            >>> recfx.verify(model, recfx.convert(model), sample).as_grid().status
            'ok'
        """
        by_status = [(status, self.of(status)) for status in get_args(Status)]
        counts = ", ".join(f"{len(checks):,} {status}" for status, checks in by_status if checks)
        verdict = "ok" if self.ok else "FAILED" if self.of(DIFFERENT) else "NOTHING COMPARED"
        above = [line for status, checks in by_status[1:] for line in _lines(status, checks)]
        largest = {
            f"{path}.{table}" if path else table: values
            for path, tables in self.tables.items()
            for table, values in tables.items()
            if any(values.values())
        }
        ordered = sorted(largest, key=lambda name: max(largest[name].values()), reverse=True)
        kinds = [kind for kind in _KINDS if any(kind in values for values in largest.values())]
        cells = [(name, *(f"{largest[name].get(kind, 0):.2g}" for kind in kinds)) for name in ordered[:_MOST_TABLES]]
        rest, equal = len(ordered) - len(cells), sum(map(len, self.tables.values())) - len(ordered)
        more = [f"and {plural(rest, 'table')} with smaller ones"] * (rest > 0)
        more += [f"no difference in {plural(equal, 'table')}"] * (equal > 0)
        return Grid(
            f"verification: {verdict} ({plural(len(self.checks), 'check')}: {counts}; "
            f"rtol={self.rtol:g}, atol={self.atol:g})",
            ("largest difference in", *kinds),
            tuple(cells),
            frozenset(kinds),
            "; ".join(more),
            tuple(above),
            "ok" if self.ok else "error",
        )


def _lines(status: str, checks: Sequence[Check]) -> Iterator[str]:
    for check in checks[:_MOST_CHECKS]:
        advice = f" What to do: {check.what_to_do}" if check.what_to_do else ""
        where = ", ".join(filter(None, (check.mode, check.batch, f"{check.what} {check.where}".rstrip())))
        yield f"{status}: {where}: {check.message}{advice}"
    if len(checks) > _MOST_CHECKS:
        yield f"... and {len(checks) - _MOST_CHECKS:,} more {status}"
