"""What ``convert`` makes of the comparison with the original: an error, or notes for the report."""

from __future__ import annotations

from torch import nn

from recfx.conversion.notes import not_verified
from recfx.diagnostics import Diagnostic
from recfx.discovery.bypass import bypassed
from recfx.discovery.classify import CONVERTIBLE
from recfx.discovery.discover import Discovery
from recfx.errors import ConversionError
from recfx.record.conversion import Conversion
from recfx.record.verify_report import DIFFERENT, EQUAL, REFUSED_SAMPLE, SKIPPED, VerifyReport
from recfx.tracing.sample import Sample
from recfx.verification.verify import verify


def check_conversion(
    model: nn.Module,
    converted: nn.Module,
    call: Sample | None,
    conversion: Conversion,
    discovery: Discovery,
    *,
    asked: bool,
) -> list[Diagnostic]:
    """Compare the converted model with the original, and return the notes of the report.

    Args:
        model: the original.
        converted: its conversion, not sharded yet.
        call: the sample.
        conversion: gets the report of the comparison.
        discovery: what was found in the model.
        asked: whether the user asked for it, however large the model is.

    Raises:
        ConversionError: ``sample_failed``, ``verification_failed``, or how the model bypasses its collections.
    """
    notes = not_verified(model, call, asked) or _compare(model, converted, call, conversion, discovery)
    return notes + _cleared_of_bypass(discovery, conversion)


def _compare(
    model: nn.Module, converted: nn.Module, call: Sample | None, conversion: Conversion, discovery: Discovery
) -> list[Diagnostic]:
    """Compare; the notes say what stood in the way where nothing could be compared."""
    assert call is not None
    report = conversion.verification = verify(model, converted, call)
    _refuse_suspected(discovery, report)
    refused = [check.message for check in report.of(DIFFERENT) if check.where == REFUSED_SAMPLE]
    if refused:
        raise ConversionError(
            f"the converted model cannot be called with the sample: {refused[0]}",
            reason="sample_failed",
            what_to_do="follow the advice above, or convert without a sample.",
        )
    for check in report.of(DIFFERENT):
        if check.what == "calls":
            raise ConversionError.of(bypassed(check.where, check.message))
    if report.of(DIFFERENT):
        raise ConversionError(
            f"the converted model does not agree with the original.\n{report}",
            reason="verification_failed",
            what_to_do="please report it with the model; verify=False converts without the check.",
        )
    skipped = report.of(SKIPPED)
    if report.ok or not skipped:
        return []
    first = skipped[0]
    if first.where == "original":
        raise ConversionError(
            f"the model cannot be called with the sample: {first.message}",
            reason="sample_failed",
            what_to_do="pass one call of the model that works, or verify=False.",
        )
    return [Diagnostic("verification_skipped", "", first.message, "compare outputs yourself.")]


def _refuse_suspected(discovery: Discovery, report: VerifyReport | None) -> None:
    """Refuse what may be called past the model's modules, unless both modes were compared and all calls agree."""
    for finding in discovery.of(CONVERTIBLE):
        counted = set() if report is None else {
            check.mode for check in report.of(EQUAL) if check.what == "calls" and check.where == finding.path
        }  # fmt: skip
        if finding.suspected is not None and (report is None or not report.ok or counted != {"train", "eval"}):
            raise ConversionError.of(finding.suspected)


def _cleared_of_bypass(discovery: Discovery, conversion: Conversion) -> list[Diagnostic]:
    """One note for each collection that verification has cleared; without verification they are refused."""
    if conversion.verification is None:
        _refuse_suspected(discovery, None)
    return [
        Diagnostic(
            "bypass_not_called",
            finding.path,
            f"the sample does not call it past the model's modules; other inputs might: {finding.suspected.message}",
            "let the model reach it by attributes of its modules alone.",
        )
        for finding in discovery.of(CONVERTIBLE)
        if finding.suspected is not None
    ]
