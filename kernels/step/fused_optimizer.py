"""Fused optimizers: the torch reference of one step that updates only the touched rows.

The caller decides what a step does to these rows. This module sums the gradients of repeated rows, and reads the rows
of weight and state from the table and writes them back. Arithmetic is float32; the result is rounded once, to the
table's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""``(values, gradient, state) -> values`` for ``n`` distinct rows; changes the rows of ``state`` in place."""


def step_touched_rows(
    update: Update,
    weight: torch.Tensor,
    rows: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
) -> None:
    """Update the touched rows of one table, in place.

    Args:
        update: what a step does to these rows.
        weight: ``[table rows, dim]``.
        rows: ``[n]`` int64, repeats allowed.
        gradient: ``[n, dim]`` float32; the gradients of a repeated row are summed.
        state: the table's state tensors, one row per row of the table; updated in place.
    """
    touched, inverse = torch.unique(rows, return_inverse=True)
    summed = torch.zeros(touched.numel(), weight.shape[1], dtype=torch.float32, device=weight.device)
    summed.index_add_(0, inverse, gradient)
    held = {name: tensor.index_select(0, touched) for name, tensor in state.items()}
    values = update(weight.index_select(0, touched).float(), summed, held)
    for name, tensor in state.items():
        tensor.index_copy_(0, touched, held[name])
    weight.index_copy_(0, touched, values.to(weight.dtype))
