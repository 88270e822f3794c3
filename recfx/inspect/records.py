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
    """The conversion records of a model.

    Args:
        conversions: (fully qualified name of the module that holds it, record); outermost first.
    """

    conversions: tuple[tuple[str, Conversion], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Records:
        """Every record in ``model``; there are several if modules were converted separately and then put together."""
        conversions = []
        for path, module in model.named_modules():
            record = conversion_of(module)
            if (record.found or record.notes) and unwrap(module) is module:
                conversions.append((path, record))
        return cls(tuple(conversions))

    def of_collection(self, finding: Finding) -> Found | None:
        """What was recorded when ``finding`` was converted or kept."""
        by_path, inside = self._by_path
        for path in finding.paths:
            if path in by_path:
                return by_path[path]
        # The module may have been wrapped, or taken out of its wrapper, since then.
        candidates = inside.get(without_wrappers(finding.path), [])
        return candidates[0] if candidates else None

    def kept(self, finding: Finding) -> Diagnostic | None:
        """Why it was kept although it can be converted, if it was."""
        record = self.of_collection(finding)
        return record.why if record is not None and record.status == REFUSED else None

    @cached_property
    def _by_path(self) -> tuple[dict[str, Found], dict[str, list[Found]]]:
        """The findings, by path in the model, and by that path without wrappers."""
        by_path: dict[str, Found] = {}
        inside: dict[str, list[Found]] = {}
        for prefix, record in reversed(self.conversions):
            for entry in record.found:
                for path in entry.paths:
                    by_path[_join(prefix, path)] = entry
                    inside.setdefault(without_wrappers(_join(prefix, path)), []).append(entry)
        return by_path, inside

    def traced(self) -> bool:
        """Whether a conversion has traced where collections are called."""
        return any(entry.found != "walked" for _, record in self.conversions for entry in record.found) or any(
            record.rollbacks for _, record in self.conversions
        )

    def verification(self, model: nn.Module, has_sample: bool = False) -> Verification:
        """The verification of the outermost conversion; if there is none, it says why.

        ``has_sample``: whether there is one now, which comes too late for a model that was converted without.
        """
        conversions = [record for _, record in self.conversions if record.found]
        if not conversions:
            built = bool(converted_collections(model))
            return Verification(None, "not run: built directly" if built else "not run: not converted yet")
        record = conversions[0]
        if record.verification is not None:
            return Verification.of(record)
        had_sample = self.traced() or isinstance(unwrap(model), WholeGraph)
        if had_sample:
            return Verification(None, "not run: verify=False")
        before = "the model was converted before, without a sample (recfx.verify compares it with the original)"
        return Verification(None, f"not run: {before if has_sample else 'no sample'}")


def _join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path
