"""torch's and TorchRec's own ways to a model that serves, taught about converted collections.

``torch.jit.script`` cannot compile a converted collection, and puts what ``__prepare_scriptable__`` returns into the
user's own model; ``torch.export`` would have to follow Python that looks at each batch. With :func:`extend_torch`, both
compile a copy around exported graphs. ``quantize_dynamic``, and
TorchRec's functions that call it, look modules up by their exact class; they would silently leave converted collections
as they are, and now say what to call.
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


def extend_torch() -> None:
    """Extend torch's compilers and ``quantize_dynamic``; called when recfx is imported, and idempotent."""
    if hasattr(torch.jit._script, "call_prepare_scriptable_func"):
        wrap_once(torch.jit._script, "call_prepare_scriptable_func", _extend_script)
    for name, extend in (("torch.export._draft_export", _refuse_draft), ("torch.export._trace", _extend_export)):
        if hasattr(module := importlib.import_module(name), "_export"):
            wrap_once(module, "_export", extend)
    for package in ("torch.ao.quantization", "torch.quantization"):
        for name in (package, f"{package}.quantize"):
            wrap_once(importlib.import_module(name), "quantize_dynamic", _refuse_converted)
    defining = importlib.import_module("torch.ao.quantization.quantize")  # `quantize` of the package is a function
    wrap_once(defining, "propagate_qconfig_", _refuse_converted)  # for what was imported from there before
    wrap_once(inference, "quantize_embeddings", _refuse_all_converted)
    wrap_once(inference, "quantize_inference_model", _refuse_all_converted)


def _extend_script(original: Callable[..., Any]) -> Callable[..., Any]:
    """The first thing that ``torch.jit.script`` calls with a module."""

    @functools.wraps(original)
    def extended(obj: Any) -> Any:
        if not _is_ours(obj):
            return original(obj)
        copied = compiled_copy(obj, TORCHSCRIPT)
        said = compiled_for_eval(obj)
        if said is not None:
            warnings.warn(str(said), stacklevel=4)  # below torch.jit.script and its implementation
        return original(copied)

    return extended


def _extend_export(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a module that ``torch.export.export`` calls."""

    @functools.wraps(original)
    def extended(mod: Any, *arguments: Any, **keywords: Any) -> Any:
        if _is_ours(mod):
            refuse_to_train(mod)
            mod = compiled_copy(mod, TORCH_EXPORT)
        return original(mod, *arguments, **keywords)

    return extended


def _refuse_draft(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a module that ``torch.export.draft_export`` calls: it asks more of operators than FBGEMM's do."""

    @functools.wraps(original)
    def extended(mod: Any, *arguments: Any, **keywords: Any) -> Any:
        if _is_ours(mod):
            raise ExportError(
                "torch.export.draft_export cannot run FBGEMM's operators, which look rows up in an exported graph.",
                reason=TORCH_EXPORT.reason,
                module_path=next(iter(converted_collections(mod))),
                what_to_do=f"call torch.export.export or {TORCH_EXPORT.instead}.",
            )
        return original(mod, *arguments, **keywords)

    return extended


def _is_ours(module: Any) -> bool:
    return isinstance(module, nn.Module) and holds_converted(module) and bool(converted_collections(module))


def refuse_to_train(model: nn.Module) -> None:
    """Check that a model that ``torch.export`` is to trace does not train.

    Raises:
        ExportError: ``training_mode``.
    """
    path = next(iter(trained_paths(model)), None)
    if path is not None:
        raise ExportError(
            "torch.export traces a converted model as it answers in eval mode, but this is in training mode.",
            reason="training_mode",
            module_path=path,
            what_to_do=f"call model.eval() first, and recfx.trace after that; {TORCH_EXPORT.instead} does so by "
            "itself. To train, use the model.",
        )


def _refuse_converted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a model and of the classes that it quantizes."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def extended(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        model, spec = next(iter(given.values())), given.get("qconfig_spec", given.get("qconfig_dict"))
        if any(kind.standard in (spec or ()) for kind in KINDS):
            refuse_to_quantize(model)
        return original(*arguments, **keywords)

    return extended


def _refuse_all_converted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a model, which quantizes its collections."""

    @functools.wraps(original)
    def extended(*arguments: Any, **keywords: Any) -> Any:
        refuse_to_quantize(arguments[0] if arguments else next(iter(keywords.values())))
        return original(*arguments, **keywords)

    return extended


def refuse_to_quantize(model: nn.Module) -> None:
    """Check that a model has no converted collections.

    Raises:
        ExportError: ``not_quantized``.
    """
    for path in converted_collections(model):
        raise ExportError(
            "TorchRec quantizes standard EmbeddingBagCollections only, and would leave this converted one as it is.",
            reason="not_quantized",
            module_path=path,
            what_to_do="call recfx.export(model, path, sample, quantize='int8'); or quantize recfx.unconvert(model), "
            "with_mapping=True where tables are hashed.",
        )
