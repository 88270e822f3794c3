"""torch's and TorchRec's own ways to a model that serves, taught about converted collections.

``torch.jit.script`` cannot compile a converted collection, and puts what ``__prepare_scriptable__`` returns into the
user's own model; with :func:`extend_torch` it compiles a copy around exported graphs. ``quantize_dynamic``, and
TorchRec's functions that call it, look modules up by their exact class; they would silently leave converted collections
as they are, and now say what to call.
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
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recfx.errors import ExportError
from recfx.exporter.scripted_copy import holds_converted, scripted_copy
from recfx.modules.converted_collection import converted_collections
from recfx.planner.torchrec_entry import wrap_once


def extend_torch() -> None:
    """Extend ``torch.jit.script`` and ``quantize_dynamic``; called when recfx is imported, and idempotent."""
    if hasattr(torch.jit._script, "call_prepare_scriptable_func"):
        wrap_once(torch.jit._script, "call_prepare_scriptable_func", _extend_script)
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
        is_ours = isinstance(obj, nn.Module) and holds_converted(obj) and bool(converted_collections(obj))
        return original(scripted_copy(obj) if is_ours else obj)

    return extended


def _refuse_converted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a model and of the classes that it quantizes."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def extended(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        model, spec = next(iter(given.values())), given.get("qconfig_spec", given.get("qconfig_dict"))
        if EmbeddingBagCollection in (spec or ()):
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
