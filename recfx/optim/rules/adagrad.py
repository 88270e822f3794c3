"""Adagrad, with a sum of squares per element."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.optim.optimizers import Adagrad as TorchRecAdagrad

from recfx.kernels.build.tiling import Need, RuleNeeds
from recfx.optim.rules.rule import EPS, LEARNING_RATE, WEIGHT_DECAY, Group, Rule, State, StateTensor, decayed


class Adagrad(Rule):
    """``sum += gradient ** 2; weight -= lr * gradient / (sqrt(sum) + eps)``."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Step as ``torch.optim.Adagrad`` does."""
        gradient = decayed(values, gradient, group)
        total = state["sum"].add_(gradient.square())
        return values - float(group["lr"]) * gradient / (total.sqrt() + group["eps"])


ADAGRAD = Adagrad(
    name="adagrad", label="Adagrad", dense_class=torch.optim.Adagrad, placeholders=(TorchRecAdagrad,),
    fused_types=(EmbOptimType.EXACT_ADAGRAD,), settings=(LEARNING_RATE, EPS, WEIGHT_DECAY),
    start_setting="initial_accumulator_value", states=(StateTensor("sum", "momentum1"),), counts_steps=True,
    needs=RuleNeeds("adagrad", Need(1744, 20, 24, 40), Need(192, 52)),
)  # fmt: skip
