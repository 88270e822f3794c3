"""The errors for what can be wrong with a saved index."""

from __future__ import annotations

from recfx.errors import CheckpointError
from recfx.hashing.config import ResolvedHashConfig
from recfx.kernels import index_rebuild
from recfx.kernels.index_buffers import IndexBuffers
from recfx.kernels.index_rebuild import Rebuilt


def torn(message: str, name: str) -> CheckpointError:
    """A ``torn_state`` error: something is missing, does not fit the rest, or is impossible."""
    return CheckpointError(
        message, reason="torn_state", module_path=name, what_to_do="The saved state is damaged: use another one."
    )


def problem_error(
    rebuilt: Rebuilt, saved_rows: int, buffers: IndexBuffers, config: ResolvedHashConfig, name: str
) -> CheckpointError:
    """The error for what ``rebuild`` found in a state of ``saved_rows`` rows that was loaded into ``buffers``."""
    problem, row = rebuilt.problem, rebuilt.row
    ids, states = buffers.row_ids, buffers.row_state
    what = "row"
    if rebuilt.is_candidate:
        ids, states, what = buffers.candidate_ids, buffers.candidate_counts, "candidate place"
    id_, state = int(ids[row]), int(states[row])
    if problem == index_rebuild.UNKNOWN_STATE:
        return torn(f"Row {row} has the invalid {'count' if rebuilt.is_candidate else 'state'} {state}.", name)
    if problem == index_rebuild.BAD_SCORE:
        scores = buffers.candidate_order if rebuilt.is_candidate else buffers.row_scores
        return torn(f"{what.capitalize()} {row} has the score {int(scores[row])}, of a batch that has not run.", name)
    if problem == index_rebuild.DUPLICATE_ID:
        return CheckpointError(
            f"Id {id_} has {what} {row} and also an earlier one.",
            reason="duplicate_id",
            module_path=name,
            what_to_do="The saved state is damaged: use another one.",
        )
    if problem in (index_rebuild.DENSE_ROW, index_rebuild.DENSE_ID):
        message = f"Row {row} belongs to id {id_}, but rows and ids below {config.dense_rows} are dense here."
        advice = "Load with the dense_rows that the state was saved with."
        return CheckpointError(message, reason="dense_id", module_path=name, what_to_do=advice)
    own_rows = ids.numel()
    if saved_rows < own_rows:
        return CheckpointError(
            f"The saved index has {saved_rows} rows, this one {own_rows}: bucket borders differ, and id {id_} in "
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
