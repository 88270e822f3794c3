"""Partial row-wise LAMB: LAMB whose divisor is one number per row."""

from __future__ import annotations

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import PartialRowWiseLAMB as TorchRecPartialRowWiseLAMB

from recfx.optim.rules.averages import AveragesOptimizer
from recfx.optim.rules.lamb import LambRule
from recfx.optim.rules.rule import ANY_MODE, BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Rule, StateTensor


class PartialRowWiseLambRule(LambRule):
    """LAMB with the mean of each row's squared gradient, which the shape of its second state asks for."""


class PartialRowWiseLamb(AveragesOptimizer):
    """The optimizer for a table that is not fused."""

    @property
    def rule(self) -> Rule:
        """Itself."""
        return PARTIAL_ROWWISE_LAMB


PARTIAL_ROWWISE_LAMB = PartialRowWiseLambRule(
    name="partial_rowwise_lamb",
    label="partial row-wise LAMB",
    dense_class=PartialRowWiseLamb,
    placeholders=(TorchRecPartialRowWiseLAMB,),
    fused_types=(EmbOptimType.PARTIAL_ROWWISE_LAMB,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY),
    states=(
        StateTensor("exp_avg", "momentum1"),
        StateTensor("exp_avg_sq", "exp_avg_sq", per_row=True),
    ),
    counts_steps=True,
    saves_step=True,
    decay_modes=ANY_MODE,
)
