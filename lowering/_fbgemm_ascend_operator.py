"""The lookup of the package fbgemm_ascend: whether it is there, and how it is called.

What is written here about the operator was read in the sources of fbgemm-ascend 1.5.0 (github.com/Ascend/fbgemm-ascend,
efdbe91, April 2026). Its kernels have never been called from here: the package needs an NPU and CANN.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from recfx.lowering.fbgemm.layout import POOLING
from recfx.lowering.fbgemm.rules import FLOAT32

NAME = "fbgemm::split_embedding_codegen_forward_unweighted_cuda"
_REQUIRED = (
    "dev_weights", "uvm_weights", "lxu_cache_weights", "weights_placements", "weights_offsets", "D_offsets", "total_D",
    "max_D", "indices", "offsets", "pooling_mode", "lxu_cache_locations", "uvm_cache_stats", "output_dtype",
    "is_experimental",
)  # fmt: skip
_OFFSET_PER_KEY = "offset_per_key"
# The package registers this operator for Autograd, and no backward of its own behind that; a release that registers it
# for PrivateUse1, as it does with its other operators, would do as well.
_KEYS = ("PrivateUse1", "AutogradPrivateUse1", "Autograd")


class WhyNot(NamedTuple):
    """Why the operator cannot be called.

    Args:
        reason: the code of a diagnostic.
        message: a sentence.
    """

    reason: str
    message: str


@cache
def why_not() -> WhyNot | None:
    """None if the operator can be called. The package is imported once; it sets the environment of CANN when it is."""
    if importlib.util.find_spec("fbgemm_ascend") is None:
        return WhyNot("no_fbgemm_ascend", "fbgemm_ascend is not installed.")
    try:
        importlib.import_module("fbgemm_ascend")
    except (
        ImportError,
        AttributeError,
        OSError,
        RuntimeError,
    ) as error:  # it loads a library that was built for one torch
        message = f"fbgemm_ascend is installed, but it cannot be imported ({type(error).__name__}: {error})."
        return WhyNot("no_fbgemm_ascend", message)
    # Where an operator has no kernel for NPUs, torch_npu falls back to the host, which does not count.
    if NAME not in torch._C._dispatch_get_all_op_names() or not any(
        torch._C._dispatch_has_kernel_for_dispatch_key(NAME, key) for key in _KEYS
    ):
        return WhyNot("no_operator", f"the installed fbgemm_ascend has no kernel of {NAME} for NPUs.")
    arguments = _operator()._schema.arguments
    required = tuple(argument.name for argument in arguments if not argument.has_default_value())
    if required != _REQUIRED or _OFFSET_PER_KEY not in {argument.name for argument in arguments}:
        return WhyNot(
            "operator_signature", f"{NAME} of the installed fbgemm_ascend takes other arguments than 1.5.0's."
        )
    return None


def _operator() -> torch._ops.OpOverload:
    operator: torch._ops.OpOverload = getattr(torch.ops.fbgemm, NAME.removeprefix("fbgemm::")).default
    return operator


def pool_table(
    weight: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, features: int, pooling: str
) -> torch.Tensor:
    """The pooled rows of one table, without autograd.

    A table per call: the operator takes one flat tensor, and tables are tensors of their own here.

    Args:
        weight: contiguous float32 ``[rows, dim]``; ``dim`` is a multiple of 8.
        rows: int64 ``[n]``, all of them in range; ``n`` is not 0.
        offsets: int64 ``[features * B + 1]``, from 0 to ``n``; ``B`` is not 0.
        features: how many features the table has.
        pooling: ``"SUM"`` or ``"MEAN"``.

    Returns:
        float32 ``[B, features * dim]``.
    """
    device, dim = weight.device, weight.shape[1]
    batch_size = (offsets.numel() - 1) // features
    none = torch.empty(0, dtype=torch.float32, device=device)
    no_numbers = torch.empty(0, dtype=torch.int32, device=device)
    columns = list(accumulate([dim] * features, initial=0))
    # In inference mode nothing is dispatched to Autograd, where the operator is.
    with torch.inference_mode(False), torch.no_grad():
        pooled: torch.Tensor = _operator()(
            weight.detach().view(-1),
            none,
            none,
            torch.zeros(features, dtype=torch.int32, device=device),
            torch.zeros(features, dtype=torch.int64, device=device),
            torch.tensor(columns, dtype=torch.int32, device=device),
            columns[-1],
            dim,
            rows,
            offsets,
            POOLING[pooling],
            no_numbers,
            no_numbers,
            FLOAT32,
            False,
            offset_per_key=offsets[::batch_size].contiguous(),
        )
    return pooled
