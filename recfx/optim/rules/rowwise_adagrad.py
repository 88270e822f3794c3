"""Row-wise Adagrad: one sum per row, of the mean of its squared gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.optim import rowwise_adagrad

from recfx.kernels.build.tiling import Need
from recfx.optim.rules.rowwise_adagrad_decoupled import ROWWISE_ADAGRAD_DECOUPLED
from recfx.optim.rules.rule import EPS, LEARNING_RATE, WEIGHT_DECAY, Rule, StateTensor, decayed


class RowWiseAdagrad(Rule):
    """``sum += mean(gradient ** 2); weight -= lr * gradient / (sqrt(sum) + eps)``, row by row."""

    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """Step as ``torchrec.optim.RowWiseAdagrad`` does."""
        gradient = decayed(values, gradient, group)
        total = state["sum"].add_(gradient.square().mean(dim=1, keepdim=True))
        return values - float(group["lr"]) * gradient / (total.sqrt() + group["eps"])

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str]:
        """Each block of columns has its own sum."""
        message = (
            f"row-wise Adagrad keeps one number per row in each of the {blocks} column blocks, a mean over the block's "
            "columns. TorchRec's does the same, but the uncut table would train differently."
        )
        return message, "use Adagrad, or do not cut columns, if training must not depend on the plan."


ROWWISE_ADAGRAD = RowWiseAdagrad(
    name="rowwise_adagrad",
    label="row-wise Adagrad",
    dense_class=rowwise_adagrad.RowWiseAdagrad,
    fused_types=(EmbOptimType.ROWWISE_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    settings=(LEARNING_RATE, EPS, WEIGHT_DECAY),
    start_setting="initial_accumulator_value",
    states=(StateTensor("sum", "momentum1", per_row=True),),
    counts_steps=True,
    decay_modes=(WeightDecayMode.L2,),
    variants={WeightDecayMode.DECOUPLE: ROWWISE_ADAGRAD_DECOUPLED},
    step_need=Need(448, 46),
    border_need=Need(384, 38),
)
