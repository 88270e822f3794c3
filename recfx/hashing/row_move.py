"""Fits a saved index to a table with more rows: each id moves to the rows that its bucket has there, in the order of
old rows. Candidates move in the same way between the places in which they are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recfx.errors import CheckpointError
from recfx.hashing import state
from recfx.hashing.identity import IDENTITY, check_identity, torn
from recfx.hashing.index import HashIndex
from recfx.kernels.index import buckets
from recfx.kernels.index.index_buffers import FREED, NEVER_USED, IndexPolicy

# Prefixes of the buffers with one value per row: for the id that has the row, or for the candidate at that place.
_ROWS, _CANDIDATES = "row_", "candidate_"


@dataclass(frozen=True)
class RowMove:
    """Where the rows of a saved table go in a bigger one."""

    saved_rows: int  # the number of rows of the saved table
    old_rows: Tensor  # int64 ``[n]``, those that are kept; the row that ids without a row read may go to several
    new_rows: Tensor  # int64 ``[n]``, where each of them goes, each once

    @classmethod
    def keep_first(cls, saved_rows: int) -> RowMove:
        rows = torch.arange(saved_rows, device="cpu")
        return cls(saved_rows, rows, rows)

    def within(self, first: int, end: int) -> RowMove:
        """The part of the move that ends in the rows ``[first, end)``; ``new_rows`` are counted from ``first``."""
        here = (self.new_rows >= first) & (self.new_rows < end)
        return RowMove(self.saved_rows, self.old_rows[here], self.new_rows[here] - first)

    def apply(self, saved: Tensor, target: Tensor) -> Tensor:
        """Write the kept rows of ``saved`` into ``target``, in place; its other rows stay as they are."""
        kept = saved.detach().index_select(0, self.old_rows.to(saved.device))
        target.index_copy_(0, self.new_rows.to(target.device), kept.to(target.device, target.dtype))
        return target


def fit_rows(index: HashIndex, saved: Mapping[str, object]) -> tuple[dict[str, object], RowMove | None]:
    """Fit a saved index to the number of rows that ``index``, which may be on meta, has: the state, and the move of the
    table's rows (None if no row moves). Damaged tensors are returned unchanged, for ``HashIndex.buffers_of`` to report.

    Raises:
        CheckpointError: ``bucket_too_small``: a bucket of the bigger table has fewer rows than ids; ``wrong_bucket``:
            an id belongs to another slice of the table than the one that ``index`` holds; or the errors of
            ``check_identity``, because rows move by the seed and the ``dense_rows`` of ``index``.
    """
    rows, config = index.policy.own_rows, index.config
    by_row = [name for name in state.state_names(config) if name not in state.NOT_BY_ROW]
    aligned = {name: saved[name] for name in by_row if saved.get(name) is not None}
    ids, row_state = aligned.get("row_ids"), aligned.get("row_state")
    tensors = {
        name: value
        for name, value in aligned.items()
        if isinstance(value, Tensor) and value.dim() == 1 and not value.is_meta
    }
    if not isinstance(ids, Tensor) or not isinstance(row_state, Tensor) or len(tensors) != len(aligned):
        return dict(saved), None
    check_identity(config, index.name, saved.get(IDENTITY))
    saved_rows = ids.numel()
    if saved_rows >= rows or any(value.numel() != saved_rows for value in tensors.values()):
        return dict(saved), None
    taken = (row_state != NEVER_USED) & (row_state != FREED)
    moves = {_ROWS: _move(ids, taken, index.policy, index.name, "ids", _saved_buckets(index, saved, saved_rows))}
    counts = aligned.get(_CANDIDATES + "counts")
    waiting = aligned.get(_CANDIDATES + "ids")
    if isinstance(counts, Tensor) and isinstance(waiting, Tensor):
        moves[_CANDIDATES] = _move(waiting, counts != 0, index.policy, index.name, "candidates", 0)
    fitted = dict(saved)
    for name, value in tensors.items():
        if name.startswith(_CANDIDATES) and _CANDIDATES not in moves:
            continue  # some are missing, which buffers_of reports
        target = value.new_full((rows,), -1 if name.endswith("_ids") else 0, device="cpu")
        # The weights of rows without an id stay, and so does the state of these rows.
        if name == "row_state" and not index.row_state.is_meta:
            target[index.row_state != NEVER_USED] = FREED
        fitted[name] = moves[_CANDIDATES if name.startswith(_CANDIDATES) else _ROWS].apply(value, target)
    return fitted, moves[_ROWS]


def _saved_buckets(index: HashIndex, saved: Mapping[str, object], saved_rows: int) -> int:
    """The number of buckets of the saved index; as many as here, if that was not saved."""
    numbers = saved.get(IDENTITY)
    if not isinstance(numbers, Tensor) or numbers.numel() < 4:
        return index.policy.buckets
    if not 1 <= int(numbers[3]) <= saved_rows:
        raise torn(f"{int(numbers[3])} is no number of buckets of a table of {saved_rows} rows.", index.name)
    return int(numbers[3])


def _move(ids: Tensor, taken: Tensor, policy: IndexPolicy, name: str, kind: str, saved_buckets: int) -> RowMove:
    ids, taken = ids.detach().cpu(), taken.cpu()
    dense = min(policy.own_dense_rows, ids.numel())
    old = dense + torch.nonzero(taken[dense:]).squeeze(1)
    bucket, order = torch.sort(buckets.bucket_of(ids[old], policy.buckets, policy.seed), stable=True)
    _refuse_other_slices(ids[old[order]], bucket, policy, name, kind)
    borders = torch.arange(policy.buckets + 1, device="cpu")
    begins = buckets.bucket_begins(borders, policy.rows, policy.dense_rows, policy.buckets) - policy.row_begin
    first = torch.searchsorted(bucket, borders[:-1])
    new = begins[bucket] + torch.arange(old.numel(), device="cpu") - first[bucket]
    beyond = torch.nonzero(new >= begins[bucket + 1] - int(policy.unseen == 2)).squeeze(1)
    if beyond.numel() > 0:
        full = int(bucket[beyond[0]])
        raise CheckpointError(
            f"The saved index has {int((bucket == full).sum())} {kind} of bucket {full}, which has "
            f"{int(begins[full + 1] - begins[full])} rows here.",
            reason="bucket_too_small",
            module_path=name,
            what_to_do=f"Build the table with more rows or fewer buckets than {policy.buckets}.",
        )
    stay = torch.arange(dense, device="cpu")
    from_rows, to_rows = torch.cat([stay, old[order]]), torch.cat([stay, new])
    if kind == "ids" and policy.unseen == 2 and policy.is_whole_table:  # what ids without a row read moves as well
        saved_borders = torch.arange(1, saved_buckets + 1, device="cpu")
        kept = buckets.bucket_begins(saved_borders, ids.numel(), policy.dense_rows, saved_buckets) - 1
        kept = kept[borders[:-1] * saved_buckets // policy.buckets]  # for each bucket here
        free = ~taken[kept]  # unless the table was saved with another `unseen`
        from_rows, to_rows = torch.cat([from_rows, kept[free]]), torch.cat([to_rows, begins[1:][free] - 1])
    return RowMove(ids.numel(), from_rows, to_rows)


def _refuse_other_slices(ids: Tensor, bucket: Tensor, policy: IndexPolicy, name: str, kind: str) -> None:
    """``bucket``: the bucket of each id."""
    own = policy.own_buckets
    foreign = torch.nonzero((bucket < own.start) | (bucket >= own.stop)).squeeze(1)
    if foreign.numel() > 0:
        raise CheckpointError(
            f"The saved index has {kind} of bucket {int(bucket[foreign[0]])}, such as {int(ids[foreign[0]])}, but "
            f"rows {policy.row_begin} to {policy.row_end} of the table have other buckets.",
            reason="wrong_bucket",
            module_path=name,
            what_to_do="Fit the state of the whole table, and slice it afterwards (recfx.hashing.slices).",
        )
