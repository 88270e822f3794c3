"""The buffers of an index: new ones that are empty, or made from a saved state, which is checked before any change."""

from collections.abc import Mapping

import torch
from torch import Tensor

from recfx.errors import CheckpointError, ConversionError
from recfx.hashing.config import ResolvedHashConfig
from recfx.hashing.identity import IDENTITY, check_identity, torn
from recfx.hashing.slices import SLICE_COUNTS, STATISTICS, parts_between
from recfx.kernels.build import library
from recfx.kernels.build.huge_pages import advise_huge_pages
from recfx.kernels.index import hash_index
from recfx.kernels.index.hash_index import NO_PROBLEM, Rebuilt
from recfx.kernels.index.index_buffers import (
    BATCH_BITS,
    BATCHES,
    COUNTERS,
    STATE,
    IndexBuffers,
    IndexPolicy,
    allocate_buffers,
    choose_seeds,
    is_taken,
)

EVERY_NAME = (*STATE, SLICE_COUNTS, IDENTITY)
"""The names of everything that any index may have saved."""
NOT_BY_ROW = ("counts", SLICE_COUNTS, IDENTITY)
ABSENT = "_recfx_absent"
"""The key by which a collection tells an index what to do if the state has nothing for it: one of the values below."""
KEEP, FORGET = "keep", "forget"
FORGET_AS_SAID = "forget as said"
"""``FORGET``, after the collection has said for all of its tables together what is lost."""

_MOST_COUNTED = 1 << 62  # no real count gets this far, and counting on after loading does not overflow
_DTYPES = {"row_state": torch.uint8, "candidate_counts": torch.int32}
_CANDIDATES = ("candidate_ids", "candidate_counts", "candidate_order")


def state_names(config: ResolvedHashConfig | IndexPolicy) -> tuple[str, ...]:
    """The buffers that an index of this kind saves, in order. All but ``NOT_BY_ROW`` have one entry per row."""
    unused = (() if config.evicts else ("row_scores",)) + (() if config.admits else _CANDIDATES)
    return (*(name for name in STATE if name not in unused), IDENTITY, SLICE_COUNTS)


def has_index(saved: Mapping[str, object]) -> bool:
    """Whether ``saved`` (by buffer name) contains anything of an index. ``identity`` alone does not count."""
    return any(saved.get(key) is not None for key in STATE)


def allocate(policy: IndexPolicy, device: str, name: str = "") -> IndexBuffers:
    """Uninitialised buffers, on ``"cpu"`` or ``"meta"``.

    Raises:
        ConversionError: ``no_library``, ``no_memory_for_rows``.
    """
    if device == "cpu" and not library.load():
        raise ConversionError(
            f"recfx's C++ library, which indexes need, is missing: {library.why_not()}.",
            reason="no_library",
            module_path=name,
            what_to_do=library.WHAT_TO_DO,
        )
    try:
        buffers = allocate_buffers(policy, device)
    except RuntimeError as error:  # of torch's allocator
        size = sum(buffer.nbytes for buffer in allocate_buffers(policy, "meta")) / 2**30
        raise ConversionError(
            f"an index of {policy.own_rows:,} rows takes {size:,.1f} GiB, which the host does not have.",
            reason="no_memory_for_rows",
            module_path=name,
            what_to_do="give the table fewer rows; a model on meta can be explained and planned with any number.",
        ) from error
    for read_at_random in (buffers.slot_groups, buffers.row_scores, buffers.candidate_slot_groups):
        advise_huge_pages(read_at_random)
    return buffers


def empty_buffers(policy: IndexPolicy, name: str = "") -> IndexBuffers:
    """The buffers of an empty index."""
    buffers = allocate(policy, "cpu", name)
    _clear(buffers)
    hash_index.rebuild(buffers, policy)
    return buffers


def buffers_from_state(policy: IndexPolicy, name: str, saved: Mapping[str, object]) -> IndexBuffers:
    """New buffers that hold a saved state.

    A state without ``row_scores`` or candidates comes from an index that did not need them: all rows are equally old
    (with ``evict="ttl"``, their time begins now). Anything that this index does not need is ignored. What slices have
    counted (``slice_counts``) is added to ``counts``.

    Args:
        policy: the policy of the index that loads the state; ``saved`` is the state of the slice that it describes.
        name: the name of the table, for messages.
        saved: tensors by name, see ``state_names``; if there are none, the index is empty.

    Raises:
        CheckpointError: ``torn_state`` (something is missing, does not fit the rest, or has impossible values),
            ``rows_mismatch`` (saved with more rows, or with fewer rows that are in different buckets here),
            ``wrong_table``, ``kept_row_taken``,
            ``wrong_seed``, ``dense_rows_mismatch``, ``duplicate_id``, ``wrong_bucket``, ``dense_id``.
    """
    if not has_index(saved):
        return empty_buffers(policy, name)
    check_identity(policy, name, saved.get(IDENTITY))
    tensors = _checked_tensors(policy, name, saved)
    saved_rows = tensors["row_ids"].numel()
    if saved_rows > policy.own_rows:
        raise CheckpointError(
            f"The saved index has {saved_rows} rows, this one {policy.own_rows}.",
            reason="rows_mismatch",
            module_path=name,
            what_to_do=f"Build the table with at least {saved_rows} rows.",
        )
    buffers = allocate(policy, "cpu", name)
    _clear(buffers)
    for key, tensor in tensors.items():
        getattr(buffers, key)[: tensor.numel()] = tensor
    buffers.row_ids.masked_fill_(~is_taken(buffers.row_state), -1)
    if policy.evicts:
        _adapt_scores(buffers, policy, name)
    _add_slice_counts(buffers, policy, name, saved.get(SLICE_COUNTS))
    if policy.ttl_batches and "row_scores" not in tensors:  # nothing says how old they are: their time begins now
        buffers.row_scores[is_taken(buffers.row_state)] = buffers.counts[BATCHES]
    if kept := [row for row in policy.kept_rows if is_taken(buffers.row_state[row])]:
        raise CheckpointError(
            f"Row {kept[0]} belongs to id {int(buffers.row_ids[kept[0]])} in the saved index, but with unseen='row' it "
            "belongs to no id here.",
            reason="kept_row_taken",
            module_path=name,
            what_to_do="Load with the unseen that the state was saved with.",
        )
    rebuilt = hash_index.rebuild(buffers, policy)
    if rebuilt.problem != NO_PROBLEM:
        raise _problem_error(rebuilt, saved_rows, buffers, policy, name)
    return buffers


def _clear(buffers: IndexBuffers) -> None:
    choose_seeds(buffers)
    for key in STATE:
        getattr(buffers, key).fill_(-1 if key in ("row_ids", "candidate_ids") else 0)


def _checked_tensors(policy: IndexPolicy, name: str, saved: Mapping[str, object]) -> dict[str, Tensor]:
    candidates = [key for key in _CANDIDATES if saved.get(key) is not None]
    needed = ("row_ids", "row_state", "counts") + (_CANDIDATES if candidates else ())
    tensors: dict[str, Tensor] = {}
    for key in STATE:
        value = saved.get(key)
        if value is None and key in needed:
            raise torn(f"{key} is missing, although other parts of the index are present.", name)
        if value is None or key not in state_names(policy):
            continue
        dtype = _DTYPES.get(key, torch.int64)
        if not isinstance(value, Tensor) or value.is_meta or value.dtype != dtype or value.dim() != 1:
            actual = type(value).__name__
            if isinstance(value, Tensor):
                actual = f"{value.dtype} {list(value.shape)} on {value.device}"
            raise torn(f"{key} must be {dtype} [rows] with data, got {actual}.", name)
        tensors[key] = value.detach().cpu()
    rows = tensors["row_ids"].numel()
    for key, tensor in tensors.items():
        if key == "counts" and tensor.numel() != len(COUNTERS):
            raise torn(f"counts must have {len(COUNTERS)} numbers, got {tensor.numel()}.", name)
        if key != "counts" and tensor.numel() != rows:
            raise torn(f"row_ids has {rows} rows and {key} {tensor.numel()}.", name)
    _check_counts(tensors["counts"].tolist(), name)
    return tensors


def _check_counts(counts: list[int], name: str) -> None:
    for counter, count in zip(COUNTERS, counts, strict=True):
        if not 0 <= count < _MOST_COUNTED:
            raise torn(f"counts says {count} {counter}, which is invalid.", name)
    if counts[BATCHES] >= 1 << BATCH_BITS:
        raise torn(f"counts says {counts[BATCHES]} batches, more than an index can count.", name)


def _add_slice_counts(buffers: IndexBuffers, policy: IndexPolicy, name: str, saved: object) -> None:
    parts = None if policy.is_whole_table else len(parts_between(policy, policy.row_begin, policy.row_end))
    counts = buffers.counts.tolist()
    if saved is not None:
        has_data = isinstance(saved, Tensor) and not saved.is_meta and saved.dtype == torch.int64 and saved.dim() == 2
        if not isinstance(saved, Tensor) or not has_data or saved.size(1) != len(STATISTICS) or bool((saved < 0).any()):
            raise torn(f"{SLICE_COUNTS} must be torch.int64 [parts, {len(STATISTICS)}] without negative counts.", name)
        if parts not in (None, saved.size(0)):  # a whole table only needs the sums
            raise torn(f"{SLICE_COUNTS} has {saved.size(0)} parts, but these rows have {parts}.", name)
        for position, column in enumerate(saved.t().tolist(), start=BATCHES + 1):
            counts[position] += sum(column)  # numbers of Python, which do not overflow
    _check_counts(counts, name)
    buffers.counts.copy_(torch.tensor(counts, device="cpu"))


def _adapt_scores(buffers: IndexBuffers, policy: IndexPolicy, name: str) -> None:
    """Convert scores that were saved with the other eviction rule, as far as possible."""
    scores, taken = buffers.row_scores, is_taken(buffers.row_state)
    if bool((scores[taken] < 0).any()):
        return  # rebuild reports where
    counted = scores >> BATCH_BITS
    if policy.evict == 1:  # lfu
        scores.copy_(torch.where(taken & (counted == 0), scores + (1 << BATCH_BITS), scores))
        return
    wrong = torch.nonzero(taken & (counted > 0)).squeeze(1)
    if 0 < wrong.numel() < int(taken.sum()):  # if all are, they are scores of the other rule
        row = int(wrong[0])
        raise torn(f"Row {row} has the score {int(scores[row])}, of a batch that has not run.", name)
    scores.copy_(torch.where(counted > 0, scores & ((1 << BATCH_BITS) - 1), scores))


def _problem_error(
    rebuilt: Rebuilt, saved_rows: int, buffers: IndexBuffers, policy: IndexPolicy, name: str
) -> CheckpointError:
    """The error for what ``rebuild`` found in a state of ``saved_rows`` rows that was loaded into ``buffers``."""
    problem, row, own_rows, place = rebuilt.problem, rebuilt.row, buffers.row_ids.numel(), "row"
    ids, states, scores = buffers.row_ids, buffers.row_state, buffers.row_scores
    if rebuilt.is_candidate:
        place = "candidate place"
        ids, states, scores = buffers.candidate_ids, buffers.candidate_counts, buffers.candidate_order
    id_ = int(ids[row])
    if problem == hash_index.UNKNOWN_STATE:
        return torn(f"{place.capitalize()} {row} has the invalid state or count {int(states[row])}.", name)
    if problem == hash_index.BAD_SCORE:
        return torn(f"{place.capitalize()} {row} has the score {int(scores[row])}, of a batch that has not run.", name)
    reason, message = "wrong_bucket", f"Id {id_} in row {row} is not in its bucket."
    advice = "Load with the seed, buckets and dense_rows that the state was saved with."
    if problem == hash_index.DUPLICATE_ID:
        reason, message = "duplicate_id", f"Id {id_} has {place} {row} and also an earlier one."
        advice = "The saved state is damaged: use another one."
    elif problem in (hash_index.DENSE_ROW, hash_index.DENSE_ID):
        reason, advice = "dense_id", "Load with the dense_rows that the state was saved with."
        message = f"Row {row} belongs to id {id_}, but rows and ids below {policy.dense_rows} are dense here."
    elif saved_rows < own_rows:
        reason, advice = "rows_mismatch", f"Build the table with {saved_rows} rows, or with buckets=1."
        message = (
            f"The saved index has {saved_rows} rows, this one {own_rows}: bucket borders differ, and id {id_} in "
            f"row {row} would be in another bucket's rows."
        )
    return CheckpointError(message, reason=reason, module_path=name, what_to_do=advice)
