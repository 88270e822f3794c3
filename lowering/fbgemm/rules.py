"""Which optimizer rules FBGEMM has CPU kernels for, and how each kernel is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from recfx.optim.rules.adagrad import ADAGRAD
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD
from recfx.optim.rules.rule import Rule
from recfx.optim.rules.sgd import SGD

FLOAT32 = 0  # fbgemm_gpu.split_embedding_configs.SparseType.FP32.as_int()


class StateArguments(NamedTuple):
    """The arguments of a kernel that come from the optimizers, not from the gradient or the tables.

    Args:
        base: the tensor that the offsets are relative to.
        placements: ``[F]`` int32 zeros.
        offsets: ``[F]`` int64, the distance of each feature's state from ``base``, in elements.
        learning_rate: one number.
        eps: 0 if the rule has none.
    """

    base: torch.Tensor
    placements: torch.Tensor
    offsets: torch.Tensor
    learning_rate: torch.Tensor
    eps: float


@dataclass(frozen=True)
class FbgemmRule:
    """One of FBGEMM's backward kernels.

    Args:
        step: calls the kernel with the arguments that all kernels share, and with those from the optimizers.
        state: the name of the state tensor that the kernel updates; empty if there is none.
        tables_in_one_call: whether the kernel addresses the states of several tables by separate offsets. FBGEMM's CPU
            Adagrad addresses its state by the weights' offsets, which only fits one table, so it needs one call per
            table.
        most_float32_elements: the limit for one float32 table; None: no limit.
        if_larger: what the kernel does to a larger table.
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
        # Its float32 kernel computes addresses within a table as uint32, which wrap around in larger tables (seen with
        # fbgemm-gpu-cpu 1.8.0).
        most_float32_elements=2**32 // 4,
        if_larger="FBGEMM's row-wise Adagrad writes to the wrong rows if a table is larger than 4 GiB.",
    ),
}
