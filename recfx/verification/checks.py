"""Compares two steps of a model, and records the results as checks of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.verification.compare_models import compare_tensors, largest_difference
from recfx.verification.run_step import COMPARED, Run
from recfx.verification.verify_report import DIFFERENT, EQUAL, Check


@dataclass(frozen=True)
class Checker:
    """Compares the step of the original with that of the converted model. Rows of ``masked`` weights may differ if the
    batch did not use them: the dense rule updates them, the fused rule does not.
    """

    collections: Mapping[str, UnshardedCollection]
    masked: frozenset[str]
    rtol: float
    atol: float

    def of_runs(self, mode: str, batch: str, expected_run: Run, actual_run: Run) -> list[Check]:
        """All values by name."""
        checks = []
        for what in COMPARED:
            expected, actual = getattr(expected_run, what), getattr(actual_run, what)
            for where in sorted(set(expected) | set(actual)):
                first, second = expected.get(where), actual.get(where)
                if what == "parameters" and where in self.masked:
                    first, second = (_touched(value, expected_run.touched.get(where)) for value in (first, second))
                checks.append(self._check(mode, batch, what, where, first, second))
        return checks

    def _check(
        self, mode: str, batch: str, what: str, where: str, expected: torch.Tensor | None, actual: torch.Tensor | None
    ) -> Check:
        if expected is None or actual is None:
            (present,) = (value for value in (expected, actual) if value is not None)
            if what == "gradients" and not bool(present.any()):
                return Check(mode, batch, what, where, EQUAL)  # a missing gradient counts as zero
            message = f"only the {'converted' if expected is None else 'original'} model has it"
            return Check(mode, batch, what, where, DIFFERENT, float("inf"), message)
        if torch.equal(expected, actual) and expected.dtype == actual.dtype:
            return Check(mode, batch, what, where, EQUAL)
        largest = largest_difference(expected, actual)
        difference = compare_tensors(where, expected, actual, self.rtol, self.atol)
        if difference is None:
            return Check(mode, batch, what, where, EQUAL, largest)
        return Check(mode, batch, what, where, DIFFERENT, largest, difference.message)

    def note_tables(self, expected_run: Run, actual_run: Run, tables: dict[str, dict[str, dict[str, float]]]) -> None:
        """Put the largest differences of each table into ``tables``, by path, table and what differs."""
        for path, collection in self.collections.items():
            of_collection = tables.setdefault(path, {})
            for table in collection.tables:
                name = kind_of(collection).weight_name(path, table.name)
                rows = expected_run.touched.get(name) if name in self.masked else None
                runs = (expected_run, actual_run)
                pairs = [
                    ("gradient", [run.gradients.get(name) for run in runs]),
                    ("weight", [_touched(run.parameters.get(name), rows) for run in runs]),
                    *(("output", [run.pooled.get((path, key)) for run in runs]) for key in table.embedding_names),
                ]
                noted = of_collection.setdefault(table.name, {})
                for what, (expected, actual) in pairs:
                    if expected is not None and actual is not None:
                        noted[what] = max(noted.get(what, 0.0), largest_difference(expected, actual))


def _touched(value: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor | None:
    """The rows that the batch used: a fused step updates only these, a dense step may update others."""
    return value if value is None or rows is None else value[rows[rows < value.shape[0]]]
