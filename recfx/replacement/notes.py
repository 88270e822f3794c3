"""What a conversion reports besides refusals: each function returns the notes of one reason code."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from recfx.collections.copy_modules import compiled_in_place
from recfx.collections.sharding.collection import sharded_collections
from recfx.discovery.classify import CONVERTIBLE
from recfx.discovery.discover import Discovery
from recfx.discovery.sample import Sample
from recfx.errors import Diagnostic

# Verification holds up to three copies of the parameters plus gradients: larger models are verified only on request.
MOST_BYTES_VERIFIED = 2 * 2**30


def compile_dropped(model: nn.Module, inplace: bool) -> list[Diagnostic]:
    """Modules on which ``Module.compile()`` was called: the compiled code is bound to the original."""
    if inplace:
        return []
    message = "Module.compile() was called on the original; the converted module runs uncompiled."
    what_to_do = "call .compile() on the converted model."
    return [Diagnostic("compile_dropped", path, message, what_to_do) for path in compiled_in_place(model)]


def read_but_not_called(discovery: Discovery) -> list[Diagnostic]:
    """Collections that code also reaches from places that a conversion cannot change, of which it calls nothing."""
    return [
        Diagnostic(
            "bypass_not_called",
            finding.path,
            f"{finding.never_called}. The source shows that nothing is called from there, where the original stays.",
            "if the code asks whether the model itself is there, put the converted model there.",
        )
        for finding in discovery.of(CONVERTIBLE)
        if finding.never_called
    ]


def not_verified(model: nn.Module, call: Sample | None, asked: bool) -> list[Diagnostic]:
    """Models that are not compared: they are on meta, or sharded, or too large to copy unless the user asks for it."""
    if (call is not None and call.on_meta()) or any(parameter.is_meta for parameter in model.parameters()):
        message = "the model is on the meta device, where nothing can be computed."
        return [Diagnostic("verification_skipped", "", message, "call recfx.verify once the model is on a device.")]
    for path in sharded_collections(model):
        message = "the model holds sharded collections, of which each rank has only a part."
        return [Diagnostic("verification_skipped", path, message, "convert all collections before any is sharded.")]
    size = sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if not isinstance(parameter, UninitializedParameter)
    )
    if asked or size <= MOST_BYTES_VERIFIED:
        return []
    message = f"the parameters take {size / 2**30:.1f} GiB, and verification works on copies of them."
    what_to_do = "pass verify=True to convert, or verify a model with smaller tables."
    return [Diagnostic("verification_skipped", "", message, what_to_do)]
