"""Partial row-wise LAMB: LAMB whose divisor is one number per row, which the shape of its second state asks for."""

from __future__ import annotations

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import PartialRowWiseLAMB as TorchRecPartialRowWiseLAMB

from recfx.optim.rules.adam import ROWWISE_AVERAGES
from recfx.optim.rules.lamb import LambRule
from recfx.optim.rules.rule import ANY_MODE, BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer


class PartialRowWiseLambRule(LambRule):
    """LAMB with the mean of each row's squared gradient."""


class PartialRowWiseLamb(TouchedRowsOptimizer):
    """The optimizer for a table that is not fused."""


PARTIAL_ROWWISE_LAMB = PartialRowWiseLambRule(
    name="partial_rowwise_lamb",
    label="partial row-wise LAMB",
    dense_class=PartialRowWiseLamb,
    placeholders=(TorchRecPartialRowWiseLAMB,),
    fused_types=(EmbOptimType.PARTIAL_ROWWISE_LAMB,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY),
    states=ROWWISE_AVERAGES,
    counts_steps=True,
    saves_step=True,
    decay_modes=ANY_MODE,
    when_cut=("scales the step of each row by norms over {blocks}", "Adam"),
)
