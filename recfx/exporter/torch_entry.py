"""torch's and TorchRec's own ways to a model that serves, which refuse converted collections and say what to call.

``torch.jit.script`` and ``torch.export`` cannot compile kernels that are chosen in Python. ``quantize_dynamic``, and
TorchRec's functions that call it, look modules up by their exact class, and would silently leave converted collections
as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from recfx.collections.converted_collection import converted_collections
from recfx.collections.first_use import wrap_once
from recfx.collections.kinds import KINDS
from recfx.errors import ExportError


class _Refusal(NamedTuple):
    message: str
    reason: str
    what_to_do: str


def _not_compiled(compiler: str, reason: str, instead: str) -> _Refusal:
    message = f"{compiler} cannot compile a converted collection, whose kernels are chosen in Python."
    return _Refusal(message, reason, f"call {instead}.")


_SCRIPT = _not_compiled("torch.jit.script", "not_scriptable", "recfx.export(model, path, sample)")
_EXPORT = _not_compiled("torch.export", "not_exportable", 'recfx.export(model, path, sample, format="pt2")')
_QUANTIZE = _Refusal(
    "TorchRec quantizes standard collections only, and would leave this converted one as it is.",
    "not_quantized",
    "call recfx.export(model, path, sample, quantize='int8'); or quantize recfx.unconvert(model), with_mapping=True "
    "where tables are hashed.",
)
_BY_CLASS = ("quantize_dynamic", "propagate_qconfig_")
"""Refused only if the classes of collections are among those to be quantized."""

_ENTRIES: dict[str, tuple[_Refusal, tuple[str, ...]]] = {
    "torch.jit._script": (_SCRIPT, ("call_prepare_scriptable_func",)),  # the first that torch.jit.script calls
    "torch.export._draft_export": (_EXPORT, ("_export",)),
    "torch.export._trace": (_EXPORT, ("_export",)),
    "torch.ao.quantization": (_QUANTIZE, _BY_CLASS[:1]),
    "torch.ao.quantization.quantize": (_QUANTIZE, _BY_CLASS),  # the second for what was imported before
    "torch.quantization": (_QUANTIZE, _BY_CLASS[:1]),
    "torch.quantization.quantize": (_QUANTIZE, _BY_CLASS[:1]),
    "torchrec.inference.modules": (_QUANTIZE, ("quantize_embeddings", "quantize_inference_model")),
}


def extend_torch() -> None:
    """Extend torch's compilers and ``quantize_dynamic``; called once by ``first_use``, and idempotent."""
    for module, (refusal, names) in _ENTRIES.items():
        for name in names:
            if hasattr(defining := importlib.import_module(module), name):
                wrap_once(defining, name, functools.partial(_refusing, refusal))


def _refusing(refusal: _Refusal, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which refuses modules that hold converted collections."""

    @functools.wraps(original)
    def extended(*arguments: Any, **keywords: Any) -> Any:
        # Other tools may have wrapped the function before: its signature need not name the module.
        module = next((value for value in (*arguments, *keywords.values()) if isinstance(value, nn.Module)), None)
        path = None if module is None else next(iter(converted_collections(module)), None)
        if path is not None and original.__name__ in _BY_CLASS:
            bound = inspect.signature(original).bind(*arguments, **keywords).arguments
            classes = bound.get("qconfig_spec", bound.get("qconfig_dict")) or ()
            path = path if any(kind.standard in classes for kind in KINDS) else None
        if path is not None:
            raise ExportError(refusal.message, reason=refusal.reason, module_path=path, what_to_do=refusal.what_to_do)
        return original(*arguments, **keywords)

    return extended
