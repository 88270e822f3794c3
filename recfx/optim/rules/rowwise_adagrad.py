"""Row-wise Adagrad: one sum per row, of the mean of its squared gradients; with any weight decay of FBGEMM's."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor
from torchrec.optim import rowwise_adagrad

from recfx.kernels.build.tiling import Need, RuleNeeds
from recfx.optim.rules.rule import (
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Group,
    Rule,
    State,
    StateTensor,
    StepNumbers,
    decayed,
)
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer, TouchedRowsRule

_SUM_PER_ROW = (StateTensor("sum", "momentum1", per_row=True),)


class RowWiseAdagrad(Rule):
    """``sum += mean(gradient ** 2); weight -= lr * gradient / (sqrt(sum) + eps)``, row by row."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Step as ``torchrec.optim.RowWiseAdagrad`` does."""
        gradient = decayed(values, gradient, group)
        total = state["sum"].add_(gradient.square().mean(dim=1, keepdim=True))
        return values - float(group["lr"]) * gradient / (total.sqrt() + group["eps"])


class RowWiseAdagradDecoupled(TouchedRowsRule):
    """Row-wise Adagrad that shrinks weights by ``lr * weight_decay`` and leaves gradients as they are."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Without weight decay, the same step as ``torchrec.optim.RowWiseAdagrad``."""
        rate, decay = float(group["lr"]), group["weight_decay"]
        total = state["sum"].add_(gradient.square().mean(dim=1, keepdim=True))
        kept = values - rate * decay * values if decay else values
        return kept - rate * gradient / (total.sqrt() + group["eps"])

    def step_numbers(self, step: float, group: Group) -> StepNumbers:
        """Weight decay is the rule's own."""
        rate = float(group["lr"])
        return StepNumbers(rate, eps=float(group["eps"]), own_decay=rate * float(group["weight_decay"]))


class DecoupledRowWiseAdagrad(TouchedRowsOptimizer):
    """The optimizer for a table that is not fused."""


ROWWISE_ADAGRAD_DECOUPLED = RowWiseAdagradDecoupled(
    name="rowwise_adagrad_decoupled",
    label="row-wise Adagrad with decoupled weight decay",
    dense_class=DecoupledRowWiseAdagrad,
    settings=(LEARNING_RATE, EPS, WEIGHT_DECAY),
    start_setting="initial_accumulator_value",
    states=_SUM_PER_ROW,
    counts_steps=True,
    decay_modes=(WeightDecayMode.DECOUPLE,),
    when_cut=("keeps one number per row, a mean over its columns, in {blocks}", "Adagrad"),
)

ROWWISE_ADAGRAD = RowWiseAdagrad(
    name="rowwise_adagrad",
    label="row-wise Adagrad",
    dense_class=rowwise_adagrad.RowWiseAdagrad,
    fused_types=(EmbOptimType.ROWWISE_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    settings=(LEARNING_RATE, EPS, WEIGHT_DECAY),
    start_setting="initial_accumulator_value",
    states=_SUM_PER_ROW,
    counts_steps=True,
    decay_modes=(WeightDecayMode.L2,),
    variants={WeightDecayMode.DECOUPLE: ROWWISE_ADAGRAD_DECOUPLED},
    needs=RuleNeeds("rowwise_adagrad", Need(3048, 22, 16, 46), Need(304, 58)),
    when_cut=("keeps one number per row in {blocks}, a mean over the block's columns", "Adagrad"),
)
