"""One step of an optimizer's rule, which updates only the rows that a batch looked up.

``recfx::fused_step_`` steps all tables of a lookup in C++ (``csrc/step/fused_step.cpp``). Its reference is
``step_touched_rows`` with a rule's ``update``, table by table; ``fused_step_triton.py`` has the kernels in Triton.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from recfx.kernels.build import library

_RULE = "_rule.h"


@cache
def rules() -> frozenset[str]:
    """The names of the rules that the operator has, each in ``csrc/step/<name>_rule.h``; it need not be built here."""
    return frozenset(path.name.removesuffix(_RULE) for path in (library.SOURCES / "step").glob(f"*{_RULE}"))


def fused_step_(
    rows: Tensor,
    offsets: Tensor,
    gradients: Sequence[Tensor | None],
    weights: list[Tensor],
    first_states: list[Tensor],
    second_states: list[Tensor],
    table_of_feature: list[int],
    is_stepped: list[bool],
    rule: str,
    numbers: list[float],
    mean: bool = False,
    per_sample_weights: Tensor | None = None,
    step_counts: Tensor | None = None,
    unpooled: bool = False,
) -> None:
    """Step the rows that a batch looked up, in place, once each. Arithmetic is float32, rounded to the table's dtype.

    The gradients of a row are summed in the order of the batch: results do not depend on the number of threads.

    Args:
        rows: int64 ``[n]``; rows of -1 get no gradient.
        offsets, table_of_feature, unpooled: as for ``pooled_lookup``.
        gradients: those of the lookup's outputs, contiguous float32: one, ``[B, sum of the features' dims]``; if
            ``unpooled``, one per feature, ``[ids of the feature, dim]``, or None: then its ids are left out.
        weights: contiguous ``[rows, dim]``, all float32, float16 or bfloat16.
        first_states: contiguous float32 ``[rows, dim]``, or ``[rows, 1]`` if the rule is row-wise, one per table; those
            of tables that are not stepped are not read. Empty if the rule has none.
        second_states: likewise, ``[rows, dim]``.
        is_stepped: of each table; the others are left alone, and so are those whose features all have no gradient.
        rule: one of ``rules()``.
        numbers: ten per table, one table after the other: ``StepNumbers`` of ``recfx.optim.rules``.
        mean: whether the lookup divided sums by the lengths of bags; not with ``per_sample_weights``.
        per_sample_weights: float32 ``[n]``, or None.
        step_counts: contiguous float32 ``[tables]``, or None: those of tables that are stepped are one more afterwards.
            The operator does this because Ctrl-C may come between two calls, but not inside of one.

    Raises:
        IndexError: a row is beyond the end of its table. Nothing has changed then.
        RuntimeError: another argument is wrong, or there is no memory for the step. Nothing has changed then.
    """
    library.operators().fused_step_(
        rows, offsets, gradients, weights, first_states, second_states, table_of_feature, is_stepped, rule, numbers,
        mean, per_sample_weights, step_counts, unpooled,
    )  # fmt: skip


Update = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""``(values, gradient, state) -> values`` for ``n`` distinct rows; changes the rows of ``state`` in place."""


def step_touched_rows(
    update: Update, weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor]
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
    state_of_rows = {name: tensor.index_select(0, touched) for name, tensor in state.items()}
    values = update(weight.index_select(0, touched).float(), summed, state_of_rows)
    for name, tensor in state.items():
        tensor.index_copy_(0, touched, state_of_rows[name])
    weight.index_copy_(0, touched, values.to(weight.dtype))
