"""torch's and TorchRec's own ways to a model that serves, taught about converted collections.

``torch.jit.script`` cannot compile a converted collection, and puts what ``__prepare_scriptable__`` returns into the
user's own model; ``torch.export`` would have to follow Python that looks at each batch. With :func:`extend_torch`, both
compile a copy around exported graphs. ``quantize_dynamic``, and TorchRec's functions that call it, look modules up by
their exact class; they would silently leave converted collections as they are, and now say what to call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch.jit._script
from torch import nn
from torchrec.inference import modules as inference

from recfx.collections.converted_collection import converted_collections
from recfx.collections.kinds import KINDS
from recfx.collections.wrap_once import wrap_once
from recfx.errors import ExportError
from recfx.exporter.compiled_copy import (
    TORCH_EXPORT,
    TORCHSCRIPT,
    compiled_copy,
    compiled_for_eval,
    holds_converted,
    trained_paths,
)
from recfx.runtime.hooks import has_forward_hooks
from recfx.versions.differences import strict_export_runs_hooks


def extend_torch() -> None:
    """Extend torch's compilers and ``quantize_dynamic``; called once by ``first_use``, and idempotent."""
    if hasattr(torch.jit._script, "call_prepare_scriptable_func"):  # the first that torch.jit.script calls
        wrap_once(torch.jit._script, "call_prepare_scriptable_func", _replacing(_for_script))
    for name, replacement in (("torch.export._draft_export", _refuse_draft), ("torch.export._trace", _for_export)):
        if hasattr(module := importlib.import_module(name), "_export"):
            wrap_once(module, "_export", _replacing(replacement))
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
            if module is None or not holds_converted(module) or not converted_collections(module):
                return original(*arguments, **keywords)
            replaced = replacement(module, inspect.signature(original).bind(*arguments, **keywords).arguments)
            if place in keywords:
                return original(*arguments, **{**keywords, place: replaced})
            return original(*arguments[:place], replaced, *arguments[place + 1 :], **keywords)

        return extended

    return extend


def _for_script(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    copied = compiled_copy(model, TORCHSCRIPT)
    notice = compiled_for_eval(model)
    if notice is not None:
        warnings.warn(str(notice), stacklevel=5)  # below torch.jit.script and its implementation
    return copied


def _for_export(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    path = next(iter(trained_paths(model)), None)
    if path is not None:
        raise ExportError(
            "torch.export traces a converted model as it answers in eval mode, but this is in training mode.",
            reason="training_mode",
            module_path=path,
            what_to_do=f"call model.eval() first, and recfx.trace after that; {TORCH_EXPORT.instead} does so by "
            "itself. To train, use the model.",
        )
    hooked = (path for path, collection in converted_collections(model).items() if has_forward_hooks(collection))
    path = next(hooked, None) if arguments.get("strict") else None
    if path is not None and not strict_export_runs_hooks():
        raise ExportError(
            f"torch.export of torch {torch.__version__} would leave out a forward hook with strict=True.",
            reason=TORCH_EXPORT.reason,
            module_path=path,
            what_to_do=f"call torch.export.export with strict=False, or {TORCH_EXPORT.instead}.",
        )
    return compiled_copy(model, TORCH_EXPORT)


def _refuse_draft(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    raise ExportError(  # a draft asks more of operators than FBGEMM's do
        "torch.export.draft_export cannot run FBGEMM's operators, which look rows up in an exported graph.",
        reason=TORCH_EXPORT.reason,
        module_path=next(iter(converted_collections(model))),
        what_to_do=f"call torch.export.export or {TORCH_EXPORT.instead}.",
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
