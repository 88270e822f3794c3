"""The result of a verification: every comparison, and the largest differences by table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from recfx.errors import printable

Status: TypeAlias = Literal["equal", "different", "not_reproducible", "skipped"]
EQUAL, DIFFERENT, NOT_REPRODUCIBLE, SKIPPED = get_args(Status)
REFUSED_SAMPLE = "refused_sample"


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        mode: ``"train"`` or ``"eval"``.
        batch: ``"sample"``, or ``"sample + 1"`` for the second batch size.
        what: ``outputs``, ``gradients``, ``parameters`` and ``buffers`` (after one step), ``calls`` (how often a
            collection is called), ``run``, or ``index`` (only where ids are not found where they are listed).
        where: output, parameter, input or collection. For a run that failed, the model that failed: ``original``,
            ``converted`` or ``refused_sample`` (converted, with an error of recfx); or what prevented the run:
            ``copy``, ``sample``, ``meta``.
        status: ``equal``, ``different``, ``not_reproducible`` (the original differs from itself) or ``skipped``.
        largest: largest absolute difference.
        message: what differs, or why it was skipped.
        what_to_do: the advice of the error that stopped a run, if it has one.
    """

    mode: str
    batch: str
    what: str
    where: str
    status: Status
    largest: float = 0.0
    message: str = ""
    what_to_do: str = ""


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """What was compared.

    Example:
        >>> model = Model()
        >>> print(recfx.verify(model, recfx.convert(model), sample))
        verification: ok (...

    Args:
        checks: every comparison.
        tables: largest differences by collection path, table and ``output``, ``gradient`` or ``weight``.
        rtol: relative tolerance used.
        atol: absolute tolerance used.
    """

    checks: tuple[Check, ...]
    tables: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    rtol: float = 1e-5
    atol: float = 1e-6

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
        return f"VerifyReport({str(self).splitlines()[0].removeprefix('verification: ')})"

    def __str__(self) -> str:
        counts = ", ".join(
            f"{len(self.of(status))} {status}"
            for status in (EQUAL, DIFFERENT, NOT_REPRODUCIBLE, SKIPPED)
            if self.of(status)
        )
        verdict = "ok" if self.ok else "FAILED" if self.of(DIFFERENT) else "NOTHING COMPARED"
        lines = [f"verification: {verdict} ({counts}; rtol={self.rtol:g}, atol={self.atol:g})"]
        for status in (DIFFERENT, NOT_REPRODUCIBLE, SKIPPED):
            checks = self.of(status)
            for check in checks[:10]:
                advice = f" What to do: {check.what_to_do}" if check.what_to_do else ""
                where = f"{check.mode}, {check.batch}, {check.what} {check.where}"
                lines.append(f"  {status}: {where}: {check.message}{advice}")
            if len(checks) > 10:
                lines.append(f"  ... and {len(checks) - 10} more {status}")
        for path, tables in self.tables.items():
            for table, largest in list(tables.items())[:10]:
                figures = ", ".join(f"{what} {value:.2g}" for what, value in largest.items())
                lines.append(f"  {path or 'ebc'}.{table}: largest difference {figures}")
            if len(tables) > 10:
                lines.append(f"  ... and {len(tables) - 10} more tables of {path or 'ebc'}")
        return "\n".join(map(printable, lines))
