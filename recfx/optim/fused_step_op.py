"""``kernels/step/fused_step_triton.py`` as the operator ``recfx::fused_step_triton_``: one step of a rule."""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from recfx.kernels.build import launch, tiling
from recfx.kernels.build.plain_arguments import triton_operator
from recfx.kernels.lookup.table_layout import layout_of, starts
from recfx.kernels.step.step_order import step_order
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import TRITON_NUMBERS, Rule, StepNumbers


def rules_in_triton() -> list[Rule]:
    """The rules that have a step in Triton."""
    return [rule for rule in RULES if triton_module(rule)]


def triton_module(rule: Rule) -> str:
    """The module with the rule's step in Triton, a file beside the rule's own; ``""`` if there is none."""
    package = type(rule).__module__.rpartition(".")[0]
    module = f"{package}.{rule.name}_triton" if package else f"{rule.name}_triton"
    return "" if find_spec(module) is None else module


@triton_operator("recfx::fused_step_triton_", mutates_args=("weights", "first_states", "second_states"))
def fused_step_triton_(
    rows: Tensor,
    offsets: Tensor,
    gradients: Tensor,
    weights: list[Tensor],
    first_states: list[Tensor],
    second_states: list[Tensor],
    table_of_feature: list[int],
    is_stepped: list[bool],
    rule_module: str,
    first_is_per_row: bool,
    numbers: list[float],
    mean: bool,
    per_sample_weights: Tensor | None,
    unpooled: bool = False,
) -> None:
    """Step the touched rows of some tables in place, once, with the gradients of a lookup: contiguous float32
    ``[B, sum of the features' dims]``, ``[n, dim]`` if ``unpooled``.

    ``rows`` and what is not named here are as in ``recfx::pooled_lookup_triton``; rows of -1 get no gradient. States
    are float32 and contiguous, one per table; empty if the rule has none, and ``[rows, 1]`` if ``first_is_per_row``.
    ``rule_module`` is as ``triton_module`` says, ``numbers`` are ``StepNumbers``. The step of a lookup that does not
    pool is that of bags of one id: a feature has one for each position of the batch, and only its own are in any.
    ``ValueError`` if ``unpooled`` and ``n`` times the features is more than 2**31 - 1; nothing has changed then.
    """
    from recfx.kernels.step.fused_step_triton import recfx_fused_step, recfx_fused_step_of_borders

    if rows.numel() == 0:
        return
    step = import_module(rule_module).step
    layout, device = layout_of(weights, table_of_feature, unpooled), rows.device
    lengths = offsets.diff()
    table_rows = [weight.shape[0] for weight in weights]
    keys, bag_of, scales = step_order(
        rows, offsets, lengths, table_rows, table_of_feature, is_stepped, per_sample_weights, unpooled
    )
    block = tiling.block_of(layout.largest_dim)
    chunks = launch.programs(device, rows.numel(), "recfx_fused_step")
    parts = torch.empty(chunks, 2, block, dtype=torch.float32, device=device)
    no_state = [parts]  # not read
    firsts, seconds = first_states or no_state, second_states or no_state

    def of_tables(ways: int) -> list[Tensor]:
        """Tables and states, each once to be read and ``ways`` times to be written."""
        return [
            *(layout.tables, layout.row_starts, layout.dims),
            *([weights[0]] * (1 + ways) + [starts(weights)]),
            *([firsts[0]] * (1 + ways) + [starts(firsts) if first_states else layout.row_starts]),
            *([seconds[0]] * (1 + ways) + [starts(seconds) if second_states else layout.row_starts]),
            parts,
        ]

    decays = StepNumbers(*numbers).weight_decay != 0
    constants = {"BLOCK_D": block, "DECAYS": decays, "STEP": step, "FIRST_IS_PER_ROW": first_is_per_row}
    constants["STATES"] = bool(first_states) + bool(second_states)
    batch_size = rows.numel() if unpooled else lengths.numel() // len(table_of_feature)
    launch.launch(
        recfx_fused_step,
        chunks,
        keys,
        bag_of,
        lengths,
        parts if scales is None else scales,  # not read if None
        gradients,
        layout.first_columns,
        *of_tables(4),
        rows.numel(),
        batch_size,
        layout.columns,
        *numbers[:TRITON_NUMBERS],
        ROWS=tiling.step_rows(block, launch.chip_of(device)),
        WEIGHTED=per_sample_weights is not None,
        MEAN=mean,
        **constants,
    )
    if chunks > 1:
        borders = (bag_of, *of_tables(1), rows.numel(), chunks, batch_size, *numbers[:TRITON_NUMBERS])
        launch.launch(recfx_fused_step_of_borders, chunks - 1, keys, *borders, **constants)


@fused_step_triton_.register_fake
def _(*arguments: object, **named: object) -> None:
    return None
