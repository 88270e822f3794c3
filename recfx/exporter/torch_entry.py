"""torch's and TorchRec's own ways to a model that serves, which refuse converted collections and say what to call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from recfx.collections.converted_collection import converted_collections
from recfx.collections.first_use import wrap_once
from recfx.collections.kinds import KINDS
from recfx.errors import ExportError

_COMPILED = "its kernels are chosen in Python, which {} cannot compile."
_REFUSALS = {
    "not_scriptable": (_COMPILED.format("torch.jit.script"), "call recfx.export(model, path, sample)."),
    "not_exportable": (_COMPILED.format("torch.export"), 'call recfx.export(model, path, sample, format="pt2").'),
    "not_quantized": (
        "TorchRec quantizes standard collections only, and would leave this converted one as it is.",
        "call recfx.export(model, path, sample, quantize='int8'); or quantize recfx.unconvert(model), "
        "with_mapping=True where tables are hashed.",
    ),
    "not_fusable": (
        "TorchRec would put a new collection, without the rows and the index, into the place of this converted one.",
        "attach the optimizer with torchrec's apply_optimizer_in_backward: recfx fuses it.",
    ),
}
"""By reason code: the message, and what to do."""

_ENTRIES = (
    ("torch.jit._script", "call_prepare_scriptable_func", "not_scriptable"),  # the first that torch.jit.script calls
    ("torch.export._draft_export", "_export", "not_exportable"),
    ("torch.export._trace", "_export", "not_exportable"),
    ("torch.ao.quantization.quantize", "propagate_qconfig_", "not_quantized"),  # the first of quantize_dynamic
    ("torchrec.modules.fused_embedding_modules", "fuse_embedding_optimizer", "not_fusable"),
)


def extend_torch() -> None:
    """Extend torch's compilers and ``quantize_dynamic``; called once by ``first_use``, and idempotent."""
    for module, name, reason in _ENTRIES:
        if hasattr(defining := importlib.import_module(module), name):
            wrap_once(defining, name, functools.partial(_refusing, reason))


def _refusing(reason: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which refuses modules that hold converted collections."""

    @functools.wraps(original)
    def extended(*arguments: Any, **keywords: Any) -> Any:
        # Other tools may have wrapped the function before: its signature need not name the module.
        given = [*arguments, *keywords.values()]
        module = next((value for value in given if isinstance(value, nn.Module)), None)
        path = None if module is None else next(iter(converted_collections(module)), None)
        is_left = reason == "not_quantized" and not any(
            isinstance(value, dict) and kind.standard in value for value in given for kind in KINDS
        )
        if path is not None and not is_left:
            message, what_to_do = _REFUSALS[reason]
            raise ExportError(message, reason=reason, module_path=path, what_to_do=what_to_do)
        return original(*arguments, **keywords)

    return extended
