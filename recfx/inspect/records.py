"""What earlier conversions of a model, or of parts of it, recorded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from recfx.collections.converted_collection import converted_collections
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap, without_wrappers
from recfx.discovery.classify import REFUSED, Finding
from recfx.errors import Diagnostic
from recfx.inspect.report_data import Verification
from recfx.replacement.conversion_record import Conversion, Found, conversion_of


@dataclass(frozen=True)
class Records:
    """The conversion records of a model; there are several if modules were converted separately and then put together.

    Args:
        conversions: (fully qualified name of the module that holds it, record); outermost first.
    """

    conversions: tuple[tuple[str, Conversion], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Records:
        """Every record in ``model``."""
        inside = [(path, conversion_of(one)) for path, one in model.named_modules() if unwrap(one) is one]
        return cls(tuple((path, record) for path, record in inside if record.found or record.notes))

    def of_collection(self, finding: Finding) -> Found | None:
        """What was recorded when ``finding`` was converted or kept."""
        # The module may have been wrapped, or taken out of its wrapper, since then.
        names = [*finding.paths, without_wrappers(finding.path)]
        return next((self._by_path[name] for name in names if name in self._by_path), None)

    def kept(self, finding: Finding) -> Diagnostic | None:
        """Why it was kept although it can be converted, if it was."""
        record = self.of_collection(finding)
        return record.why if record is not None and record.status == REFUSED else None

    @cached_property
    def _by_path(self) -> dict[str, Found]:
        """The collections by path in the model, and by that path without wrappers, the outermost record first."""
        exact: dict[str, Found] = {}
        inside: dict[str, Found] = {}
        for prefix, record in self.conversions:
            for entry in record.found:
                for path in (f"{prefix}.{path}" if prefix and path else prefix or path for path in entry.paths):
                    exact.setdefault(path, entry)
                    inside.setdefault(without_wrappers(path), entry)
        return inside | exact

    def traced(self) -> bool:
        """Whether a conversion has traced where collections are called."""
        records = [record for _, record in self.conversions]
        return any(record.rollbacks or any(one.found != "walked" for one in record.found) for record in records)

    def verification(self, model: nn.Module, has_sample: bool = False) -> Verification:
        """The verification of the outermost conversion; if there is none, it says why.

        ``has_sample``: whether there is one now, which comes too late for a model that was converted without.
        """
        record = next((record for _, record in self.conversions if record.found), None)
        if record is None:
            built = bool(converted_collections(model))
            return Verification(None, "not run: built directly" if built else "not run: not converted yet")
        if record.verification is not None:
            return Verification.of(record)
        if self.traced() or isinstance(unwrap(model), WholeGraph):
            return Verification(None, "not run: verify=False")
        before = "the model was converted before, without a sample (recfx.verify compares it with the original)"
        return Verification(None, f"not run: {before if has_sample else 'no sample'}")
