"""Which optimizer rules FBGEMM's kernels for the CPU carry out, and how each of these kernels is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recfx.optim.rules.adagrad import ADAGRAD
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD
from recfx.optim.rules.rule import Rule
from recfx.optim.rules.sgd import SGD

FLOAT32 = 0  # fbgemm_gpu.split_embedding_configs.SparseType.FP32.as_int()


@dataclass(frozen=True)
class StateArguments:
    """What a kernel takes of the optimizers beside the gradient and the tables.

    Args:
        base: the tensor from which the offsets count.
        placements: ``[F]`` int32 zeros.
        offsets: ``[F]`` int64 distances of the features' states from ``base``, in elements.
        learning_rate: one number.
        eps: 0 where the rule has none.
    """

    base: torch.Tensor
    placements: torch.Tensor
    offsets: torch.Tensor
    learning_rate: torch.Tensor
    eps: float


@dataclass(frozen=True)
class FbgemmRule:
    """One backward kernel of FBGEMM's.

    Args:
        step: calls it with the arguments that all kernels have in common, and the optimizers'.
        state: name of the state tensor that it updates; empty: none.
        tables_in_one_call: whether it finds the states of several tables by their own offsets. FBGEMM's CPU Adagrad
            addresses its state by the weights' offsets, so the two must be laid out alike: one call per table.
        most_float32_elements: of one float32 table; None: no limit.
        if_larger: what the kernel does to a larger one.
    """

    step: Callable[[list[Any], StateArguments], None]
    state: str = ""
    tables_in_one_call: bool = True
    most_float32_elements: int | None = None
    if_larger: str = ""


def _sgd(common: list[Any], state: StateArguments) -> None:
    torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(*common, state.learning_rate, FLOAT32)


def _adagrad(common: list[Any], state: StateArguments) -> None:
    torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_cpu(
        *common, state.base, state.placements, state.offsets, state.learning_rate, state.eps, FLOAT32
    )


def _rowwise_adagrad(common: list[Any], state: StateArguments) -> None:
    torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
        *common, state.base, state.placements, state.offsets, state.learning_rate, state.eps, 0.0, 0, 0.0, FLOAT32
    )


FBGEMM_RULES: Mapping[Rule, FbgemmRule] = {
    SGD: FbgemmRule(_sgd),
    ADAGRAD: FbgemmRule(_adagrad, state="sum", tables_in_one_call=False),
    ROWWISE_ADAGRAD: FbgemmRule(
        _rowwise_adagrad,
        state="sum",
        # Its float32 kernel computes addresses in a table as uint32 (seen with fbgemm-gpu-cpu 1.8.0): beyond, they wrap
        # around.
        most_float32_elements=2**32 // 4,
        if_larger="FBGEMM's row-wise Adagrad writes to other rows where a table is larger than 4 GiB.",
    ),
}
