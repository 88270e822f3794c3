"""The ranges of ids that the user has declared, beside those that the trace has found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recfx.collections.kinds import kind_of
from recfx.discovery.classify import CONVERTIBLE
from recfx.discovery.discover import Discovery
from recfx.errors import ConversionError, type_of
from recfx.hashing.config import as_integer
from recfx.ir.tables import IdRange


def declare_id_ranges(discovery: Discovery, declared: Any) -> None:
    """Add the ``id_ranges`` of ``convert`` to the findings. Where the trace knows more, its range is narrowed by them.

    Raises:
        ConversionError: ``invalid_argument``; ``unknown_feature``: no convertible collection reads it.
    """
    if declared is None:
        return
    ranges = _checked(declared)
    read = set()
    for finding in discovery.of(CONVERTIBLE):
        configs = kind_of(finding.module).configs_of(finding.module)
        features = {feature for config in configs for feature in config.feature_names}
        read |= features
        for feature in features & ranges.keys():
            finding.id_ranges[feature] = _narrowed(finding.id_ranges.get(feature), ranges[feature])
    if unknown := sorted(ranges.keys() - read):
        raise ConversionError(
            f"id_ranges names feature {unknown[0]!r}, which no collection that can be converted reads.",
            reason="unknown_feature",
            what_to_do=f"name features of their tables: {', '.join(sorted(read)[:8])}{', ...' * (len(read) > 8)}.",
        )


def _checked(declared: Any) -> dict[str, IdRange]:
    if not isinstance(declared, Mapping):
        raise _invalid(f"id_ranges is {type_of(declared)}.")
    found = {}
    for feature, given in declared.items():
        bounds = [as_integer(bound) for bound in given] if isinstance(given, (tuple, list)) else []
        if not isinstance(feature, str) or len(bounds) != 2 or None in bounds:
            raise _invalid(f"id_ranges has {feature!r}: {given!r}.")
        lower, upper = bounds
        assert lower is not None
        assert upper is not None
        if lower > upper:
            raise _invalid(f"id_ranges has {feature!r}: {given!r}, whose lowest id is above the highest.")
        found[feature] = IdRange(lower, upper, f"declared for feature {feature!r}")
    return found


def _narrowed(traced: IdRange | None, declared: IdRange) -> IdRange:
    if traced is None or traced.upper < declared.lower or declared.upper < traced.lower:
        return declared
    if declared.lower <= traced.lower and traced.upper <= declared.upper:
        return traced
    lower, upper = max(traced.lower, declared.lower), min(traced.upper, declared.upper)
    return IdRange(lower, upper, f"{traced.proof}; {declared.proof}")


def _invalid(message: str) -> ConversionError:
    return ConversionError(
        message,
        reason="invalid_argument",
        what_to_do="pass a dict from features to their lowest and highest id: {'user': (0, 999)}.",
    )
