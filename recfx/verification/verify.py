"""``recfx.verify``: is the converted model the original one? Outputs, gradients and one optimizer step, on copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recfx.collections.converted_collection import converted_collections
from recfx.discovery.discover import check_module
from recfx.discovery.sample import Sample
from recfx.discovery.verify_report import SKIPPED, Check, VerifyReport
from recfx.discovery.wrappers import unwrap
from recfx.errors import ConversionError
from recfx.verification.compare_models import batch_sizes
from recfx.verification.comparison import Comparison

# Tables below float32 are pooled in another precision by the standard collection.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2}


def verify(
    original: nn.Module, converted: nn.Module, sample: Any, *, rtol: float = 1e-5, atol: float = 1e-6
) -> VerifyReport:
    """Compare a converted model with the original: outputs, gradients and one step, train and eval, two batch sizes.

    Works on copies, so random states, indexes, norms and gradients of both models stay as they are. The step is SGD if
    no optimizer runs in the backward. A hashed table is compared with the standard collection, whose ids are mapped
    through ``items()``.

    Args:
        original: the model with standard collections.
        converted: what ``convert`` made of it.
        sample: one call, as for ``convert``.
        rtol: relative tolerance; at least 1e-2 with float16 tables and 2e-2 with bfloat16 ones.
        atol: absolute tolerance, likewise.

    Raises:
        ConversionError: ``invalid_argument``; ``sharded_model``: one rank does not hold the whole model.
    """
    check_module(original, "original")
    check_module(converted, "converted")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not 0 <= value < float("inf"):
            raise ConversionError(
                f"{name} is {value!r}.",
                reason="invalid_argument",
                what_to_do=f"pass a finite number that is not below 0 for {name}.",
            )
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller's modes are
        return _verify(original, converted, Sample.of(sample), rtol, atol)


def _verify(original: nn.Module, converted: nn.Module, call: Sample, rtol: float, atol: float) -> VerifyReport:
    _refuse_sharded(original, converted)
    original, converted = unwrap(original), unwrap(converted)
    if call.on_meta() or any(parameter.is_meta for parameter in converted.parameters()):
        message = "the model is on the meta device, where nothing can be computed"
        return VerifyReport((Check("", "", "run", "meta", SKIPPED, message=message),), rtol=rtol, atol=atol)
    floor = max([_TOLERANCE.get(parameter.dtype, 0.0) for parameter in converted.parameters()], default=0.0)
    comparison = Comparison(original, converted, max(rtol, floor), max(atol, floor))
    comparison.check_indexes()
    for batch, sized in batch_sizes(call):
        for mode in ("train", "eval"):
            if sized is None:
                comparison.skip(mode, batch, "sample", "the sample's batch size is unknown")
            else:
                comparison.compare(mode, batch, sized)
    return comparison.report()


def _refuse_sharded(*models: nn.Module) -> None:
    for model in models:
        for path, collection in converted_collections(model).items():
            if collection.is_sharded:
                raise ConversionError(
                    "the collection is sharded: a rank has only its own shards and samples, and nothing to compare "
                    "them with.",
                    reason="sharded_model",
                    module_path=path,
                    what_to_do="verify before sharding; convert(model, sample, plan=...) does so by itself.",
                )
