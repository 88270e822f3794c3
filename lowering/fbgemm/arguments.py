"""How FBGEMM's table-batched kernels are called: one for each optimizer rule, and the arguments that are constant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from recfx.errors import ConversionError
from recfx.ir.tables import TableSpec
from recfx.kernels.build.launch import elements_between
from recfx.lowering.registry import LookupSpec
from recfx.optim.rules.adagrad import ADAGRAD
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD
from recfx.optim.rules.rule import Rule
from recfx.optim.rules.sgd import SGD

FLOAT32 = 0  # fbgemm_gpu.split_embedding_configs.SparseType.FP32.as_int()


class StateArguments(NamedTuple):
    """The arguments of a kernel that come from the optimizers, not from the gradient or the tables.

    ``offsets``, int64 ``[F]``, are the distances of each feature's state from ``base``, in elements; ``placements`` are
    ``[F]`` int32 zeros; ``eps`` is 0 if the rule has none.
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


POOLING = {"SUM": 0, "MEAN": 1}


class Layout:
    """The constant arguments of FBGEMM's kernels, for all tables of a lookup or for one of them."""

    def __init__(self, spec: LookupSpec) -> None:
        # The weights are not kept: they may be replaced, and the old ones must then be freed.
        self.tables, self.optimizers = spec.tables, spec.optimizers
        self.base = torch.empty(1, dtype=spec.weights[0].dtype, device="cpu")
        self.pooling = POOLING[spec.combine]
        features = [len(table.feature_names) for table in spec.tables]
        columns = [count * table.embedding_dim for count, table in zip(features, spec.tables, strict=True)]
        self._first_features, self._first_columns = [0, *accumulate(features)], [0, *accumulate(columns)]
        self.total_dim = self._first_columns[-1]
        self.whole = Part(spec.tables, range(len(spec.tables)), 0, 0)
        self._parts: dict[int, Part] = {}
        self._last: tuple[tuple[int, ...], torch.Tensor] | None = None

    def part(self, table: int) -> Part:
        if table not in self._parts:
            first_feature, first_column = self._first_features[table], self._first_columns[table]
            self._parts[table] = Part(self.tables, range(table, table + 1), first_feature, first_column)
        return self._parts[table]

    def weight_offsets(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """``[F]`` distances in elements from the base to each feature's table; recomputed only if a table has moved."""
        addresses = tuple(weight.data_ptr() for weight in weights)
        if self._last is None or self._last[0] != addresses:
            self._last = addresses, distances(self.base, addresses, self.whole.table_of_feature)
        return self._last[1]


class Part:
    """The constant arguments for some adjacent tables; columns and bags are still those of the whole lookup.

    ``first_feature`` and ``first_column`` are where these tables begin in the lookup.
    """

    def __init__(self, described: tuple[TableSpec, ...], tables: range, first_feature: int, first_column: int) -> None:
        self.table_of_feature = [table for table in tables for _ in described[table].feature_names]
        self.features = first_feature, first_feature + len(self.table_of_feature)
        dims = [described[table].embedding_dim for table in self.table_of_feature]
        self.max_dim = max(described[table].embedding_dim for table in tables)
        self.dim_offsets = torch.tensor([*accumulate(dims, initial=first_column)], dtype=torch.int32, device="cpu")
        starts, total = {}, 0
        for table in tables:
            starts[table] = total
            total += described[table].num_embeddings
        cumulative = [starts[table] for table in self.table_of_feature] + [total]
        self.row_offsets = torch.tensor(cumulative, dtype=torch.int64, device="cpu")
        self.row_bits = max(1, total.bit_length())
        self.at_start = torch.zeros(len(self.table_of_feature), dtype=torch.int64, device="cpu")
        self.placements = torch.zeros(len(self.table_of_feature), dtype=torch.int32, device="cpu")


def distances(base: torch.Tensor, addresses: tuple[int, ...], table_of_feature: list[int]) -> torch.Tensor:
    """``[F]`` int64: how many elements after ``base`` each feature's table begins (before it, if negative).

    Raises:
        ConversionError: ``backend_unusable``: a distance is no whole number.
    """
    try:
        elements = [elements_between(base, addresses[table]) for table in table_of_feature]
    except ValueError as error:
        raise ConversionError(
            f"backend 'fbgemm' cannot use a table, or the state of its optimizer: {error}.",
            reason="backend_unusable",
            what_to_do="use backend='auto', or replace its memory by a copy (weight.data = weight.data.clone()).",
        ) from error
    return torch.tensor(elements, dtype=torch.int64, device="cpu")
