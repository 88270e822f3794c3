"""The gradient of pooled lookups with respect to their per-sample weights, on the CPU.

The function calls the C++ operator of the same name (``csrc/lookup/per_sample_weights.cpp``); ``library.load()`` must
have been called first. ``per_sample_weights_reference.py`` implements the same contract.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import library


def per_sample_weight_gradients(
    rows: Tensor, offsets: Tensor, gradients: Tensor, weights: list[Tensor], table_of_feature: list[int]
) -> Tensor:
    """For each position, the gradient of its bag times its row (SUM). The result depends on no number of threads.

    Args:
        rows, offsets, weights, table_of_feature: as for ``pooled_lookup``.
        gradients: contiguous float32 ``[B, sum of the features' dims]``, of the lookup's output.

    Returns:
        float32 ``[n]``; 0 for a row of -1, and for positions in no bag.

    Raises:
        IndexError: a row is beyond the end of its table.
        RuntimeError: another argument is wrong.
    """
    found: Tensor = torch.ops.recfx.per_sample_weight_gradients(rows, offsets, gradients, weights, table_of_feature)
    return found


@library.when_loaded
def _register_fakes() -> None:
    @torch.library.register_fake("recfx::per_sample_weight_gradients")
    def _per_sample_weight_gradients(rows: Tensor, *rest: object) -> Tensor:
        return rows.new_empty(rows.numel(), dtype=torch.float32)
