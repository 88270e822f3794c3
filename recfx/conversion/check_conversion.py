"""Turns the comparison with the original into an error, or into notes for the report."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from recfx.collections.copy_modules import attributes, compiled_in_place
from recfx.collections.replaced import REPLACED
from recfx.collections.sharding.collection import sharded_collections
from recfx.conversion.request import Request
from recfx.discovery.discover import Discovery
from recfx.discovery.sample import Sample
from recfx.errors import ConversionError, Diagnostic, Severity
from recfx.replacement.conversion_record import Conversion
from recfx.runtime.base import FORWARD_HOOKS
from recfx.verification.verify import verify
from recfx.verification.verify_report import DIFFERENT, REFUSED_SAMPLE, SKIPPED, VerifyReport

# Verification holds up to three copies of the parameters plus gradients: larger models are verified only on request.
MOST_BYTES_VERIFIED = 2 * 2**30


def compile_dropped(model: nn.Module, inplace: bool) -> list[Diagnostic]:
    """Modules on which ``Module.compile()`` was called: the compiled code is bound to the original."""
    if inplace:
        return []
    message = "Module.compile() was called on the original; the converted module runs uncompiled."
    what_to_do = "call .compile() on the converted model."
    return [Diagnostic("compile_dropped", path, message, what_to_do) for path in compiled_in_place(model)]


def refers_to_original(model: nn.Module, inplace: bool) -> list[Diagnostic]:
    """Functions and weak references in attributes and hooks that hold modules of the original: a copy shares them."""
    modules = {id(module) for module in model.modules()}
    notes: dict[str, Diagnostic] = {}
    for path, module in model.named_modules() if not inplace else ():
        hooks = [hook for name in FORWARD_HOOKS for hook in module.__dict__.get(name, {}).values()]
        values = tree_leaves([hooks, *(value for _, value in attributes(module))])
        if any(id(item) in modules for value in values for item in _shared_by_copies(value)):
            message = "a closure or weak reference, in an attribute or a hook, goes on using the original modules."
            what_to_do = "pass inplace=True, or make it again for the converted model."
            notes[path] = Diagnostic("refers_to_original", path, message, what_to_do, Severity.WARNING)
    return list(notes.values())


def _shared_by_copies(value: Any) -> list[Any]:
    """What a function, a cached one, or a weak reference refers to."""
    value = getattr(value, "__wrapped__", value) if callable(value) else value
    if isinstance(value, weakref.ref):
        return [getattr(value(), "__self__", value())]
    cells = value.__closure__ or () if isinstance(value, FunctionType) else ()
    return [cell.cell_contents for cell in cells if cell != CellType()]


def check_conversion(
    model: nn.Module, converted: nn.Module, asked: Request, conversion: Conversion, discovery: Discovery
) -> list[Diagnostic]:
    """Compare the converted model, not sharded yet, with the original; add the report to ``conversion``, and return its
    notes. Raises ``sample_failed``, ``verification_failed`` or ``replaced_collection_called``.
    """
    skipped = _why_not_verified(model, asked.call, bool(asked.verify))
    if skipped is None:
        assert asked.call is not None
        report = conversion.verification = verify(model, converted, asked.call)
        # What was run overrules the trace, which enters neither hooks nor a forward that is put on a module.
        for finding in discovery.findings:
            if finding.found == "never called" and report.called.intersection(finding.paths):
                finding.found = "traced"
        conversion.found = [
            replace(record, found="traced")
            if record.found == "never called" and report.called.intersection(record.paths)
            else record
            for record in conversion.found
        ]
        skipped = _judge(report)
    return [] if skipped is None else [skipped]


def _why_not_verified(model: nn.Module, call: Sample | None, whatever_its_size: bool) -> Diagnostic | None:
    """Models that are not compared: they are on meta, or sharded, or too large to copy unless the user asks for it."""

    def skipped(message: str, what_to_do: str, path: str = "") -> Diagnostic:
        return Diagnostic("verification_skipped", path, message, what_to_do)

    if (call or Sample()).on_meta(model):
        message = "the model is on the meta device, where nothing can be computed."
        return skipped(message, "call recfx.verify once the model is on a device.")
    for path in sharded_collections(model):
        message = "the model holds sharded collections, of which each rank has only a part."
        return skipped(message, "convert all collections before any is sharded.", path)
    size = sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if not isinstance(parameter, UninitializedParameter)
    )
    if whatever_its_size or size <= MOST_BYTES_VERIFIED:
        return None
    message = f"the parameters take {size / 2**30:.1f} GiB, and verification works on copies of them."
    return skipped(message, "pass verify=True to convert, or verify a model with smaller tables.")


def _judge(report: VerifyReport) -> Diagnostic | None:
    """Refuse a conversion that differs from the original; if nothing could be compared, the note says why."""
    for check in report.of(DIFFERENT):
        if check.where == REFUSED_SAMPLE:
            raise ConversionError(
                f"the converted model cannot be called with the sample: {check.message}",
                reason="sample_failed",
                what_to_do=check.what_to_do or "pass another sample, or convert without one.",
            )
        if check.what == "calls":
            raise ConversionError(check.message, reason=REPLACED, module_path=check.where, what_to_do=check.what_to_do)
    if report.of(DIFFERENT):
        raise ConversionError(
            f"the converted model does not agree with the original.\n{report}",
            reason="verification_failed",
            what_to_do="please report this, with the model; verify=False converts without the check.",
        )
    if report.ok or not report.of(SKIPPED):
        return None
    first = report.of(SKIPPED)[0]
    if first.where == "original":
        raise ConversionError(
            f"the model cannot be called with the sample: {first.message}",
            reason="sample_failed",
            what_to_do=first.what_to_do or "pass one call of the model that works, or verify=False.",
        )
    return Diagnostic("verification_skipped", "", first.message, "compare outputs yourself.")
