"""SGD without momentum."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.optim.optimizers import SGD as TorchRecSGD

from recfx.kernels.build.tiling import Need, RuleNeeds
from recfx.optim.rules.rule import LEARNING_RATE, WEIGHT_DECAY, Group, Rule, State, decayed


class Sgd(Rule):
    """``weight -= lr * gradient``."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Step as ``torch.optim.SGD`` does."""
        return values - float(group["lr"]) * decayed(values, gradient, group)


SGD = Sgd(
    name="sgd",
    label="SGD",
    dense_class=torch.optim.SGD,
    placeholders=(TorchRecSGD,),
    fused_types=(EmbOptimType.SGD, EmbOptimType.EXACT_SGD),
    settings=(LEARNING_RATE, WEIGHT_DECAY),
    needs=RuleNeeds("sgd", Need(1296, 20, 16, 28), Need(192, 32)),
)
