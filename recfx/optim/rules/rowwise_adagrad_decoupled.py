"""Row-wise Adagrad with decoupled weight decay: ``weight_decay_mode=WeightDecayMode.DECOUPLE`` of FBGEMM."""

from __future__ import annotations

from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor

from recfx.optim.rules.rule import EPS, LEARNING_RATE, WEIGHT_DECAY, Group, State, StateTensor, StepNumbers
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer, TouchedRowsRule


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
    states=(StateTensor("sum", "momentum1", per_row=True),),
    counts_steps=True,
    decay_modes=(WeightDecayMode.DECOUPLE,),
    when_cut=("keeps one number per row, a mean over its columns, in {blocks}", "Adagrad"),
)
