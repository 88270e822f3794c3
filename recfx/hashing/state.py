"""The buffers of an index: an empty set, and a set made of saved state, checked before anything is touched."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.errors import CheckpointError
from recfx.hashing.config import ResolvedHashConfig
from recfx.kernels import hash_index
from recfx.kernels.free_rows import word_count
from recfx.kernels.hash_index import IndexBuffers
from recfx.kernels.huge_pages import advise_huge_pages
from recfx.kernels.slot_table import slot_count

ROW_IDS = "row_ids"
ROW_STATE = "row_state"


def allocate(config: ResolvedHashConfig, device: str) -> IndexBuffers:
    """Buffers without content, on ``"cpu"`` or ``"meta"``."""

    def int64(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    slots = int64(slot_count(config.index_rows), 2)
    advise_huge_pages(slots)
    return IndexBuffers(
        slots=slots,
        side_row=int64(1),
        row_ids=int64(config.rows),
        row_state=torch.empty(config.rows, dtype=torch.uint8, device=device),
        free_rows=int64(word_count(config.rows)),
        bucket_taken=int64(config.buckets),
    )


def empty_buffers(config: ResolvedHashConfig) -> IndexBuffers:
    """Buffers of an index that holds nothing."""
    buffers = allocate(config, "cpu")
    buffers.row_ids.fill_(-1)
    buffers.row_state.zero_()
    hash_index.rebuild(buffers, config.dense_rows, config.seed)
    return buffers


def buffers_from_state(
    config: ResolvedHashConfig, name: str, row_ids: object | None, row_state: object | None
) -> IndexBuffers:
    """New buffers that hold what was saved.

    Args:
        config: of the index that loads.
        name: of the table, for messages.
        row_ids: saved int64 ``[saved rows]``; None where the state has none.
        row_state: saved uint8 ``[saved rows]``; None where the state has none. Both None: an empty index.

    Raises:
        CheckpointError: ``torn_state`` (one of the two is missing, or they do not fit each other, or hold a state that
            does not exist), ``rows_mismatch`` (saved with more rows, or with fewer that end up in other buckets here),
            ``duplicate_id``, ``wrong_bucket``, ``dense_id``.
    """
    if row_ids is None and row_state is None:
        return empty_buffers(config)
    saved_ids = _checked_tensor(row_ids, ROW_IDS, torch.int64, name)
    saved_state = _checked_tensor(row_state, ROW_STATE, torch.uint8, name)
    saved_rows = saved_ids.numel()
    if saved_state.numel() != saved_rows:
        raise _torn(f"{ROW_IDS} has {saved_rows} rows and {ROW_STATE} {saved_state.numel()}.", name)
    if saved_rows > config.rows:
        raise CheckpointError(
            f"The saved index has {saved_rows} rows, this one {config.rows}.",
            reason="rows_mismatch",
            module_path=name,
            what_to_do=f"Build the table with at least {saved_rows} rows.",
        )
    buffers = allocate(config, "cpu")
    buffers.row_state.zero_()
    buffers.row_state[:saved_rows] = saved_state
    buffers.row_ids.fill_(-1)
    buffers.row_ids[:saved_rows] = saved_ids
    buffers.row_ids.masked_fill_(buffers.row_state == 0, -1)
    problem, row = hash_index.rebuild(buffers, config.dense_rows, config.seed).tolist()
    if problem != hash_index.NO_PROBLEM:
        raise _problem_error(problem, row, saved_rows, buffers, config, name)
    return buffers


def _checked_tensor(value: object, key: str, dtype: torch.dtype, name: str) -> Tensor:
    if value is None:
        raise _torn(f"{key} is missing, while the other half of the index is there.", name)
    if not isinstance(value, Tensor) or value.is_meta or value.dtype != dtype or value.dim() != 1:
        if isinstance(value, Tensor):
            found = f"{value.dtype} {list(value.shape)} on {value.device}"
        else:
            found = type(value).__name__
        raise _torn(f"{key} must be {dtype} [rows] with data, got {found}.", name)
    return value.detach().cpu()


def _torn(message: str, name: str) -> CheckpointError:
    return CheckpointError(
        message, reason="torn_state", module_path=name, what_to_do="The saved state is damaged: use another one."
    )


def _problem_error(
    problem: int, row: int, saved_rows: int, buffers: IndexBuffers, config: ResolvedHashConfig, name: str
) -> CheckpointError:
    id_, state = int(buffers.row_ids[row]), int(buffers.row_state[row])
    if problem == hash_index.UNKNOWN_STATE:
        return _torn(f"Row {row} has the state {state}, which does not exist.", name)
    if problem == hash_index.DUPLICATE_ID:
        return CheckpointError(
            f"Id {id_} has row {row} and a row before it.",
            reason="duplicate_id",
            module_path=name,
            what_to_do="The saved state is damaged: use another one.",
        )
    if problem in (hash_index.DENSE_ROW, hash_index.DENSE_ID):
        what = f"Row {row} belongs to id {id_}, but rows and ids below {config.dense_rows} are not the index's here."
        advice = "Load with the dense_rows that the state was saved with."
        return CheckpointError(what, reason="dense_id", module_path=name, what_to_do=advice)
    if saved_rows < config.rows:
        return CheckpointError(
            f"The saved index has {saved_rows} rows, this one {config.rows}: bucket borders differ, and id {id_} in "
            f"row {row} would be in another bucket's rows.",
            reason="rows_mismatch",
            module_path=name,
            what_to_do=f"Build the table with {saved_rows} rows, or with buckets=1.",
        )
    return CheckpointError(
        f"Id {id_} in row {row} is not in its bucket.",
        reason="wrong_bucket",
        module_path=name,
        what_to_do="Load with the seed, buckets and dense_rows that the state was saved with.",
    )
