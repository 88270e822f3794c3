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
from typing import Any

import torch.jit._script
from torch import nn
from torchrec.inference import modules as inference

from recfx.collections.converted_collection import converted_collections
from recfx.collections.kinds import KINDS
from recfx.collections.wrap_once import wrap_once
from recfx.errors import ExportError


def extend_torch() -> None:
    """Extend torch's compilers and ``quantize_dynamic``; called once by ``first_use``, and idempotent."""
    if hasattr(torch.jit._script, "call_prepare_scriptable_func"):  # the first that torch.jit.script calls
        wrap_once(torch.jit._script, "call_prepare_scriptable_func", _replacing(_refuse_to_script))
    for name in ("torch.export._draft_export", "torch.export._trace"):
        if hasattr(module := importlib.import_module(name), "_export"):
            wrap_once(module, "_export", _replacing(_refuse_to_export))
    for package in ("torch.ao.quantization", "torch.quantization"):
        for name in (package, f"{package}.quantize"):
            wrap_once(importlib.import_module(name), "quantize_dynamic", _replacing(_refuse_by_class))
    defining = importlib.import_module("torch.ao.quantization.quantize")  # `quantize` of the package is a function
    wrap_once(defining, "propagate_qconfig_", _replacing(_refuse_by_class))  # for what was imported from there before
    for name in ("quantize_embeddings", "quantize_inference_model"):
        wrap_once(inference, name, _replacing(_refuse_to_quantize))


def _replacing(replacement: Callable[[nn.Module, dict[str, Any]], nn.Module]) -> Callable[..., Callable[..., Any]]:
    """Extends a function so that it gets a replacement for a module that holds converted collections.

    Args:
        replacement: makes the replacement from the module and all arguments by name, or raises an error.
    """

    def extend(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def extended(*arguments: Any, **keywords: Any) -> Any:
            # Other tools may have wrapped the function before: its signature need not name the module.
            places: list[tuple[Any, Any]] = [*enumerate(arguments), *keywords.items()]
            place, module = next(((place, value) for place, value in places if isinstance(value, nn.Module)), (0, None))
            if module is None or not converted_collections(module):
                return original(*arguments, **keywords)
            replaced = replacement(module, inspect.signature(original).bind(*arguments, **keywords).arguments)
            if place in keywords:
                return original(*arguments, **{**keywords, place: replaced})
            return original(*arguments[:place], replaced, *arguments[place + 1 :], **keywords)

        return extended

    return extend


def _refuse_to_script(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    raise _not_compiled(model, "torch.jit.script", "not_scriptable", "recfx.export(model, path, sample)")


def _refuse_to_export(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    raise _not_compiled(model, "torch.export", "not_exportable", 'recfx.export(model, path, sample, format="pt2")')


def _not_compiled(model: nn.Module, compiler: str, reason: str, instead: str) -> ExportError:
    return ExportError(
        f"{compiler} cannot compile a converted collection, whose kernels are chosen in Python.",
        reason=reason,
        module_path=next(iter(converted_collections(model))),
        what_to_do=f"call {instead}.",
    )


def _refuse_by_class(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    """Refuse to quantize if the classes of collections are among those to be quantized."""
    classes = arguments.get("qconfig_spec", arguments.get("qconfig_dict")) or ()
    return _refuse_to_quantize(model, arguments) if any(kind.standard in classes for kind in KINDS) else model


def _refuse_to_quantize(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    raise ExportError(
        "TorchRec quantizes standard collections only, and would leave this converted one as it is.",
        reason="not_quantized",
        module_path=next(iter(converted_collections(model))),
        what_to_do="call recfx.export(model, path, sample, quantize='int8'); or quantize recfx.unconvert(model), "
        "with_mapping=True where tables are hashed.",
    )
