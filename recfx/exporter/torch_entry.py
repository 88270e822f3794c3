"""torch's and TorchRec's own ways to a model that serves, which refuse converted collections and say what to call.

``torch.jit.script`` and ``torch.export`` cannot compile kernels that are chosen in Python. ``quantize_dynamic``, and
TorchRec's functions that call it, look modules up by their exact class, and would silently leave converted collections
as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.jit._script
from torch import nn
from torchrec.inference import modules as inference

from recfx.collections.converted_collection import converted_collections
from recfx.collections.first_use import wrap_once
from recfx.collections.kinds import KINDS
from recfx.errors import ExportError


def extend_torch() -> None:
    """Extend torch's compilers and ``quantize_dynamic``; called once by ``first_use``, and idempotent."""
    if hasattr(torch.jit._script, "call_prepare_scriptable_func"):  # the first that torch.jit.script calls
        wrap_once(torch.jit._script, "call_prepare_scriptable_func", _refusing(_scripted))
    for name in ("torch.export._draft_export", "torch.export._trace"):
        if hasattr(module := importlib.import_module(name), "_export"):
            wrap_once(module, "_export", _refusing(_exported))
    for package in ("torch.ao.quantization", "torch.quantization"):
        for name in (package, f"{package}.quantize"):
            wrap_once(importlib.import_module(name), "quantize_dynamic", _refusing(_quantized_by_class))
    defining = importlib.import_module("torch.ao.quantization.quantize")  # `quantize` of the package is a function
    wrap_once(defining, "propagate_qconfig_", _refusing(_quantized_by_class))  # for what was imported before
    for name in ("quantize_embeddings", "quantize_inference_model"):
        wrap_once(inference, name, _refusing(_quantized))


def _refusing(refusal: Callable[[str, Mapping[str, Any]], ExportError | None]) -> Callable[..., Callable[..., Any]]:
    """Extends a function so that it may refuse modules that hold converted collections.

    Args:
        refusal: the error, if there is one, for the path of the first collection and all arguments by name.
    """

    def extend(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def extended(*arguments: Any, **keywords: Any) -> Any:
            # Other tools may have wrapped the function before: its signature need not name the module.
            values = (*arguments, *keywords.values())
            module = next((value for value in values if isinstance(value, nn.Module)), None)
            for path in {} if module is None else converted_collections(module):
                error = refusal(path, inspect.signature(original).bind(*arguments, **keywords).arguments)
                if error is not None:
                    raise error
                break
            return original(*arguments, **keywords)

        return extended

    return extend


def _scripted(path: str, arguments: Mapping[str, Any]) -> ExportError:
    return _not_compiled(path, "torch.jit.script", "not_scriptable", "recfx.export(model, path, sample)")


def _exported(path: str, arguments: Mapping[str, Any]) -> ExportError:
    return _not_compiled(path, "torch.export", "not_exportable", 'recfx.export(model, path, sample, format="pt2")')


def _not_compiled(path: str, compiler: str, reason: str, instead: str) -> ExportError:
    return ExportError(
        f"{compiler} cannot compile a converted collection, whose kernels are chosen in Python.",
        reason=reason,
        module_path=path,
        what_to_do=f"call {instead}.",
    )


def _quantized_by_class(path: str, arguments: Mapping[str, Any]) -> ExportError | None:
    """Refused if the classes of collections are among those to be quantized."""
    classes = arguments.get("qconfig_spec", arguments.get("qconfig_dict")) or ()
    return _quantized(path, arguments) if any(kind.standard in classes for kind in KINDS) else None


def _quantized(path: str, arguments: Mapping[str, Any]) -> ExportError:
    return ExportError(
        "TorchRec quantizes standard collections only, and would leave this converted one as it is.",
        reason="not_quantized",
        module_path=path,
        what_to_do="call recfx.export(model, path, sample, quantize='int8'); or quantize recfx.unconvert(model), "
        "with_mapping=True where tables are hashed.",
    )
