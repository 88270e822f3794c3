"""Checks of what ``HashIndex`` is given: its arguments, and the ids of each call."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.errors import ConversionError, IdTypeError, InputError
from recfx.hashing.config import HashConfig, ResolvedHashConfig, as_integer
from recfx.kernels.index.index_buffers import IndexPolicy


def checked_arguments(
    rows: int, config: HashConfig | ResolvedHashConfig, name: str, row_begin: int, row_end: int | None
) -> tuple[ResolvedHashConfig, IndexPolicy]:
    """The configuration for the table, and its form for the operators, for the slice that the index holds.

    Raises:
        ConversionError: ``invalid_hash_config``.
    """
    resolved = config if isinstance(config, ResolvedHashConfig) else config.resolve(rows, False, name)
    if resolved.rows != rows:
        raise _invalid(
            f"HashConfig.rows is {resolved.rows}, but the index is built with {rows} rows.",
            name,
            "Give the number of rows once.",
        )
    if not resolved.has_index:
        raise _invalid(
            f"HashConfig.dense_rows is {resolved.dense_rows}, all rows of the table: there is nothing to index.",
            name,
            "Give fewer dense_rows (0 for raw ids), or more rows.",
        )
    begin = _row_number("row_begin", row_begin, name)
    end = resolved.rows if row_end is None else _row_number("row_end", row_end, name)
    policy = resolved.policy._replace(row_begin=begin, row_end=end)
    if not (0 <= begin < end <= policy.rows and policy.may_be_border(begin) and policy.may_be_border(end)):
        raise _invalid(
            f"Rows {begin} to {end} are not a slice of a table of {policy.rows} rows, {policy.dense_rows} of them "
            f"dense, with {policy.buckets} buckets.",
            name,
            "A slice has at least one row, and its borders are among the dense rows or where a bucket begins; "
            "recfx.hashing.slices.row_cuts returns such borders.",
        )
    return resolved, policy


def _row_number(argument: str, value: object, name: str) -> int:
    row = as_integer(value)
    if row is None:
        raise _invalid(f"{argument} is {value!r}.", name, f"{argument} must be a row of the table, an integer.")
    return row


def _invalid(message: str, name: str, what_to_do: str) -> ConversionError:
    return ConversionError(message, reason="invalid_hash_config", module_path=name, what_to_do=what_to_do)


def check_ids(ids: Tensor, name: str, *, on_meta: bool) -> None:
    """Check ids whose rows are asked for.

    Args:
        ids: what was given as ids.
        name: the name of the table, for messages.
        on_meta: whether the index is on the meta device.

    Raises:
        IdTypeError: ``wrong_id_dtype``.
        InputError: ``wrong_id_layout``, ``wrong_id_shape``, ``index_on_meta``.
    """
    refused: tuple[type[IdTypeError | InputError], str, str]
    argument: object = ids  # users do not always run a type checker
    if not isinstance(argument, Tensor):
        refused = IdTypeError, "wrong_id_dtype", f"Ids must be a tensor, got {type(argument).__name__}."
        what_to_do = "pass torch.tensor(ids, dtype=torch.int64)."
    elif ids.layout != torch.strided:
        refused = InputError, "wrong_id_layout", f"Ids must be a dense tensor, got one of layout {ids.layout}."
        what_to_do = "pass the ids themselves: ids.values() of a sparse or a jagged tensor."
    elif ids.dtype not in (torch.int64, torch.int32):
        refused = IdTypeError, "wrong_id_dtype", f"Ids must be int64 or int32, got {ids.dtype}."
        what_to_do = "convert them with .to(torch.int64)."
    elif ids.dim() != 1:
        refused = InputError, "wrong_id_shape", f"Ids must be [n], got {list(ids.shape)}."
        what_to_do = "flatten them with .reshape(-1)."
    elif on_meta and not ids.is_meta:
        refused = InputError, "index_on_meta", "The index is on the meta device, where it holds no ids."
        what_to_do = "call to_empty(device='cpu') on the model first, and load its state if it has one."
    else:
        return
    error, reason, message = refused
    raise error(message, reason=reason, module_path=name, what_to_do=what_to_do)
