"""The initial weights of new rows: a pure function of seed, table name and id.

Column ``j`` of the row of ``id`` is ``low + (high - low) * u`` in float32, cast to the weight's dtype. ``u`` in
``[0, 1)`` is the top 24 bits of ``mix64(mix64(id ^ key) + (j + 1) * 0x9E3779B97F4A7C15)`` over ``2**24``, and ``key``
is derived from the seed and the table (``initialization_key``). So a row does not depend on when, on which thread or
on which rank its id arrived.

``recfx::init_rows_`` runs in C++ where all tensors are on the CPU (``csrc/step/row_initialization.cpp``), and in ATen
everywhere else. ``recfx::init_rows_triton_`` initialises the rows of several tables by the kernel in
``row_initialization_triton.py``, and what the states of their optimizers begin with. All write the same bits.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import launch, library
from recfx.kernels.build.launch import elements_between
from recfx.kernels.build.plain_arguments import triton_operator
from recfx.kernels.index.mix64 import mix64, mix64_integer, shifted_right, to_int64


@lru_cache(maxsize=4096)
def initialization_key(table_name: str, seed: int) -> int:
    """An int64 that distinguishes the rows of one table and seed from those of any other."""
    digest = hashlib.sha256(table_name.encode(errors="surrogatepass")).digest()
    return to_int64(int.from_bytes(digest[:8], "little")) ^ mix64_integer(seed)


def initialize_rows(
    weight: Tensor, rows: Tensor, ids: Tensor, key: int, low: float, high: float, first_column: int = 0
) -> None:
    """Write the initial rows of ``ids`` into ``weight[rows]``.

    This does not increment the weight's autograd version: rows are initialised during a forward pass, and a new row has
    not been read before, so nothing that autograd has saved changes.

    Args:
        weight: fp32, fp16, bf16 or fp64 ``[table rows, dim]``, on any device.
        rows, ids: int64 ``[n]``; all rows are distinct.
        key: from ``initialization_key``.
        low, high: the range.
        first_column: the weight's first column in the table, if the weight is a shard of some of its columns.
    """
    data = weight.data  # shares the memory but not the version counter; detach() would share both
    # torch's fallback for negated views corrupts the memory of operators that return nothing.
    if data.device.type != "cpu" or (data.stride(1) == 1 and not data.is_neg()):
        library.operators().init_rows_(data, rows, ids, key, low, high, first_column)
    else:
        values = data.new_empty(rows.numel(), data.shape[1])
        library.operators().init_rows_(values, torch.arange(rows.numel()), ids, key, low, high, first_column)
        data.index_copy_(0, rows, values)


@library.reference("init_rows_")
def init_rows_reference_(
    weight: Tensor, rows: Tensor, ids: Tensor, key: int, low: float, high: float, first_column: int = 0
) -> None:
    """The operator in ATen; the tensors may be on different devices and have any strides."""
    values = initial_rows(ids.to(weight.device), weight.size(1), key, low, high, first_column)
    weight.index_copy_(0, rows.to(weight.device), values.to(weight.dtype))


def initial_rows(ids: Tensor, dim: int, key: int, low: float, high: float, first_column: int = 0) -> Tensor:
    """The initial rows of these ids, float32 ``[n, dim]`` on their device; arguments as above. Scriptable."""
    column = torch.arange(first_column + 1, first_column + dim + 1, dtype=torch.int64, device=ids.device)
    bits = mix64(mix64(ids ^ key).unsqueeze(1) + column * -7046029254386353131)  # 0x9E3779B97F4A7C15
    uniform = shifted_right(bits, 40).to(torch.float32) * 5.9604644775390625e-08  # 2 ** -24, exact
    # The ends are rounded to float32 before they are subtracted, as in C++.
    ends = torch.tensor([low, high], dtype=torch.float32, device=ids.device)
    return uniform * (ends[1] - ends[0]) + ends[0]


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KEPT = 1024  # collections of one process


class StateOfRows(NamedTuple):
    """A state of an optimizer, float32 ``[table rows, any number of columns]``, and what its rows begin with."""

    tensor: Tensor
    value: float


class TableOfRows(NamedTuple):
    """A table as ``initialize_rows`` takes it, and its optimizer's states."""

    weight: Tensor
    key: int
    low: float
    high: float
    first_column: int
    states: tuple[StateOfRows, ...]


class TableFacts(NamedTuple):
    """What the kernel has to know of one table, in the order of its constants. A state without columns is none."""

    weight_start: int  # elements from the first table
    stride: int
    dim: int
    key: int
    first_column: int
    first_start: int
    first_dim: int
    second_start: int
    second_dim: int


def are_in_triton(tables: Sequence[TableOfRows]) -> bool:
    """Whether ``initialize_rows_of_tables`` takes them."""
    weight = tables[0].weight
    if weight.dtype not in _DTYPES or weight.device.type == "cpu" or not launch.is_possible(weight.device):
        return False
    return all(
        (table.weight.device, table.weight.dtype) == (weight.device, weight.dtype)
        and table.weight.stride(1) == 1
        and not table.weight.is_neg()
        and len(table.states) <= 2
        and all(_is_plain(state.tensor, weight.device) for state in table.states)
        for table in tables
    )


def _is_plain(state: Tensor, device: torch.device) -> bool:
    return state.device == device and state.dtype == torch.float32 and state.dim() == 2 and state.is_contiguous()


def initialize_rows_of_tables(entries: Tensor, tables: Sequence[TableOfRows]) -> None:
    """Write the initial rows of ids into tables, and what the states of these rows begin with, in one launch.

    This does not increment the weights' autograd versions, see ``initialize_rows``.

    Args:
        entries: int64 ``[n, 3]`` on the device of the tables: a row, its id, and the table's position in ``tables``;
            no row of a table twice.
        tables: see ``are_in_triton``.
    """
    nothing = StateOfRows(tables[0].weight.new_empty(0, 0, dtype=torch.float32), 0.0)
    first, second = zip(*((*table.states, nothing, nothing)[:2] for table in tables), strict=True)
    _, keys, lows, highs, first_columns, _ = map(list, zip(*tables, strict=True))
    init_rows_triton_(
        entries, [table.weight.data for table in tables], [state.tensor for state in first],
        [state.tensor for state in second], keys, first_columns, lows, highs, [state.value for state in first],
        [state.value for state in second],
    )  # fmt: skip


@triton_operator(
    "recfx::init_rows_triton_", mutates_args=("weights", "first_states", "second_states"), rows_apart=("weights",)
)
def init_rows_triton_(
    entries: Tensor,
    weights: list[Tensor],
    first_states: list[Tensor],
    second_states: list[Tensor],
    keys: list[int],
    first_columns: list[int],
    lows: list[float],
    highs: list[float],
    first_values: list[float],
    second_values: list[float],
) -> None:
    """``initialize_rows_of_tables``; a table without a state has one without columns."""
    from recfx.kernels.step.row_initialization_triton import recfx_initialize_rows

    if entries.numel() == 0:
        return
    weight, first, second = weights[0], first_states[0], second_states[0]
    facts = tuple(
        TableFacts(
            elements_between(weight, of_table[0].data_ptr()),
            of_table[0].stride(0),
            of_table[0].shape[1],
            key,
            first_column,
            elements_between(first, of_table[1].data_ptr()),
            of_table[1].shape[1],
            elements_between(second, of_table[2].data_ptr()),
            of_table[2].shape[1],
        )
        for *of_table, key, first_column in zip(weights, first_states, second_states, keys, first_columns, strict=True)
    )
    values = tuple(zip(lows, highs, first_values, second_values, strict=True))
    on_device = _on_device(entries.device, facts, values)
    # Two roundings, as everywhere else.
    options = {"enable_fp_fusion": False} if entries.device.type == "cuda" else {}
    number = launch.programs(entries.device, entries.shape[0])
    launch.launch(
        recfx_initialize_rows, number, entries, *on_device, weight, first, second, entries.shape[0], **options
    )


@init_rows_triton_.register_fake
def _(*arguments: object) -> None:
    return None


@lru_cache(maxsize=_KEPT)
def _on_device(
    device: torch.device, facts: tuple[TableFacts, ...], values: tuple[tuple[float, float, float, float], ...]
) -> tuple[Tensor, Tensor]:
    """``tables`` and ``values`` of the kernel."""
    numbers = torch.tensor(values, dtype=torch.float32, device="cpu")
    numbers[:, 1] -= numbers[:, 0]  # the ends are rounded to float32 before they are subtracted, as in C++
    return torch.tensor(facts, dtype=torch.int64, device=device), numbers.to(device)


def init_rows_of_tables_reference_(
    entries: Tensor,
    weights: list[Tensor],
    first_states: list[Tensor],
    second_states: list[Tensor],
    keys: list[int],
    first_columns: list[int],
    lows: list[float],
    highs: list[float],
    first_values: list[float],
    second_values: list[float],
) -> None:
    """``init_rows_triton_`` in ATen, table by table, on any device."""
    for table, weight in enumerate(weights):
        rows, ids, _ = entries[entries[:, 2] == table].unbind(1)
        init_rows_reference_(weight, rows, ids, keys[table], lows[table], highs[table], first_columns[table])
        for states, values in ((first_states, first_values), (second_states, second_values)):
            if states[table].shape[1]:
                states[table].index_fill_(0, rows, values[table])
