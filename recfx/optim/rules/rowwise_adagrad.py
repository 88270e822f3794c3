"""Row-wise Adagrad: one sum per row, of the mean of its squared gradients."""

from __future__ import annotations

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor
from torchrec.optim import rowwise_adagrad

from recfx.kernels.build.tiling import Need
from recfx.optim.rules.rowwise_adagrad_decoupled import ROWWISE_ADAGRAD_DECOUPLED
from recfx.optim.rules.rule import EPS, LEARNING_RATE, WEIGHT_DECAY, Group, Rule, State, StateTensor, decayed


class RowWiseAdagrad(Rule):
    """``sum += mean(gradient ** 2); weight -= lr * gradient / (sqrt(sum) + eps)``, row by row."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Step as ``torchrec.optim.RowWiseAdagrad`` does."""
        gradient = decayed(values, gradient, group)
        total = state["sum"].add_(gradient.square().mean(dim=1, keepdim=True))
        return values - float(group["lr"]) * gradient / (total.sqrt() + group["eps"])


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
    step_need=Need(3048, 22, 16, 46),
    border_need=Need(304, 58),
    when_cut=("keeps one number per row in {blocks}, a mean over the block's columns", "Adagrad"),
)
