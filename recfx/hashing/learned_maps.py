"""What managed-collision modules have learned: which id has which row, and how old it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recfx.errors import ConversionError
from recfx.hashing import HashConfig, HashIndex, ResolvedHashConfig
from recfx.hashing.identity import IDENTITY
from recfx.kernels.index.index_buffers import BATCH_BITS, BATCHES, FREED, INSERTED, MOST_SIGHTINGS, TAKEN

_RULES = ("on_full", "evict", "unseen", "admit_after")


@dataclass(frozen=True)
class LearnedMap:
    """The ids of one table."""

    rows: int  # the number of rows of the table; with ``misses``, the last one is the row that unknown ids read
    ids: Tensor  # int64 ``[n]``, each once
    rows_of_ids: Tensor  # int64 ``[n]``, each once
    config: HashConfig  # what comes closest to the module's rules
    last_batches: Tensor  # int64 ``[n]``, the batch in which each id was seen last, as far as that is known
    counts_batches: bool  # whether that is the number of a batch; if not, it only gives the order
    sightings: Tensor  # int64 ``[n]``, how often each id has been seen, as far as that is known
    batches: int  # how many batches the module has seen
    misses: bool  # whether unknown ids read a row of their own

    def differing_rules(self, config: ResolvedHashConfig) -> list[str]:
        """The rules of ``config`` that are not those that come closest, as sentences without a full stop."""
        pairs = {name: (getattr(config, name), getattr(self.config, name)) for name in _RULES}
        if config.on_full != "evict":
            del pairs["evict"]  # nothing reads it
        return [f"{name} is {ours!r}, not {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]

    @property
    def is_whole(self) -> bool:
        """Whether each id is there once, and has a row of its own in the table."""
        rows, count = self.rows_of_ids, self.ids.numel()
        in_table = bool(((rows >= 0) & (rows < self.rows)).all())
        return in_table and rows.unique().numel() == count and self.ids.unique().numel() == count

    def reads_as(self, other: LearnedMap) -> bool:
        """Whether every id, known or not, reads the same row in tables of both maps."""
        same_ids = torch.equal(self.ids, other.ids) and torch.equal(self.rows_of_ids, other.rows_of_ids)
        return same_ids and (self.rows, self.misses) == (other.rows, other.misses)

    def fill(self, index: HashIndex, weight: Tensor) -> None:
        """Give ``index``, which is empty, the ids. It and its table have at least as many rows, in one bucket if there
        are ids. Every row that unknown ids read is that of the module.

        Raises:
            CheckpointError: the map is damaged.
        """
        policy = index.config
        rows = policy.rows
        row_ids = torch.full((rows,), -1, dtype=torch.int64)
        row_ids[self.rows_of_ids] = self.ids
        row_state = torch.full((rows,), FREED, dtype=torch.uint8)  # whoever gets the row does not get its weights
        row_state[self.rows_of_ids] = TAKEN
        counts = torch.zeros_like(index.counts)
        counts[BATCHES], counts[INSERTED] = self.batches, self.ids.numel()
        state: dict[str, object] = {
            "row_ids": row_ids,
            "row_state": row_state,
            "counts": counts,
            IDENTITY: index.identity,
        }
        if policy.evicts:
            scores = torch.zeros(rows, dtype=torch.int64)
            in_batches = self.counts_batches or not policy.ttl_batches
            scores[self.rows_of_ids] = self.last_batches if in_batches else self.batches
            if policy.evict == "lfu":
                scores[self.rows_of_ids] += self.sightings.clamp(max=MOST_SIGHTINGS) << BATCH_BITS
            state["row_scores"] = scores
        if self.misses and policy.unseen == "row":
            weight.data[index.policy.kept_rows] = weight.data[self.rows - 1].clone()
        index.take_state(index.buffers_of(state))


def config_of_learned(learned: LearnedMap, asked: HashConfig | None, table: str, path: str) -> HashConfig:
    """How a table with a learned map is hashed, given what the user asks for it; the default asks for nothing.

    Raises:
        ConversionError: ``learned_ids_lost``.
    """
    if asked == HashConfig():
        return learned.config
    buckets = 1 if asked is None or asked.buckets is None else asked.buckets
    if asked is None or asked.dense_rows not in (None, 0) or (buckets > 1 and learned.ids.numel()):
        raise ConversionError(
            f"a managed-collision module gives rows of table {table!r} to ids, and hashing= would not keep them.",
            reason="learned_ids_lost",
            module_path=path,
            what_to_do="pass as hashing= a dict by table name that leaves the table out, or gives it a HashConfig "
            "without dense_rows, and without buckets if the module has learned ids.",
        )
    fewest = learned.rows + (asked.unseen == "row" and not learned.misses)  # that row belongs to no id
    rows = asked.rows if fewest == learned.rows else max(asked.rows or 0, fewest)
    return replace(asked, dense_rows=0, buckets=buckets, rows=rows)
