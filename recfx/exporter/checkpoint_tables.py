"""The tables of a checkpoint, read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from recfx.checkpoint import storage
from recfx.checkpoint.contents import MODEL, mismatch
from recfx.checkpoint.directory import told_as
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.checkpoint.storage import Parts
from recfx.collections.kinds import CollectionKind
from recfx.errors import InputError
from recfx.exporter.buffers import PIECE_BYTES
from recfx.exporter.gathered_tables import empty_index
from recfx.hashing import HashIndex
from recfx.hashing.identity import IDENTITY, check_identity
from recfx.ir.facts import FrozenIndex
from recfx.ir.tables import TableSpec

_INDEX_STATE = ("row_ids", "row_state")


@dataclass
class CheckpointTable:
    """One table of a checkpoint, saved by any number of ranks.

    Args:
        spec: the whole table, with the dtype that was saved.
        folder: the data folder, verified.
        weight: name of the weight in the checkpoint.
        prefix: prefix of the names of its index's state there.
    """

    spec: TableSpec
    folder: SavedFolder
    weight: str
    prefix: str
    ids: int = 0
    _side_row: int = field(default=-1, init=False)

    @classmethod
    def of(cls, spec: TableSpec, folder: SavedFolder, collection: str, kind: CollectionKind) -> CheckpointTable:
        """The table of this description in the collection of this kind whose keys have a prefix.

        Raises:
            CheckpointError: ``checkpoint_mismatch``: it was saved with another size; or what is wrong with its index.
        """
        weight = MODEL + collection + kind.weight_name("", spec.name)
        prefix = f"{MODEL}{collection}hash_indexes.{spec.name}."
        rows, saved = (spec.num_embeddings, spec.embedding_dim), folder.tensors[weight]
        index = [folder.tensors[prefix + name].size for name in _INDEX_STATE if spec.has_index]
        wrong = [size for size in index if size != rows[:1]]
        if saved.size != rows or wrong:
            index_size = f" with an index of {wrong[0]}" if wrong else ""
            raise mismatch(
                f"the table was saved as {saved.size}{index_size}, but is {rows}.",
                module_path=weight.removeprefix(MODEL),
                what_to_do="build the model as it was built when saving: only load_checkpoint makes tables bigger.",
            )
        return cls(replace(spec, dtype=saved.dtype), folder, weight, prefix)

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The row of each id, -1 for one that reads zeros; also counts the ids of the index.

        Args:
            ids: int64 ``[n]``.

        Raises:
            InputError: ``id_out_of_range``.
            CheckpointError: what is wrong with the saved index.
        """
        if not self.spec.has_index:
            outside = ids[(ids < 0) | (ids >= self.spec.num_embeddings)]
            if outside.numel():
                raise InputError(
                    f"the sample has id {int(outside[0])}, but the table has {self.spec.num_embeddings} rows.",
                    reason="id_out_of_range",
                    module_path=self.spec.name,
                    what_to_do="pass a sample with ids of the table.",
                )
            return ids
        index = self._read_index()
        self.ids, self._side_row = len(index), int(index.side_row[0])
        return index.answer(ids)

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows, ``[n, dim]``, one by one."""
        found = torch.empty(rows.numel(), self.spec.embedding_dim, dtype=self.spec.dtype, device="cpu")
        for number, row in enumerate(rows.tolist()):
            self._read(self.weight, (row, 0), found[number : number + 1])
        return found

    @property
    def index(self) -> FrozenIndex | None:
        """None if ids are rows. Known after ``rows_of``."""
        if not self.spec.has_index:
            return None
        return FrozenIndex(empty_index(self.spec, "meta").slot_count, self._side_row)

    def row_pieces(self) -> Iterator[torch.Tensor]:
        """Read from the checkpoint."""
        rows, dim = self.spec.num_embeddings, self.spec.embedding_dim
        step = max(1, PIECE_BYTES // max(1, dim * self.spec.dtype.itemsize))
        for begin in range(0, rows, step):
            piece = torch.empty(min(step, rows - begin), dim, dtype=self.spec.dtype, device="cpu")
            self._read(self.weight, (begin, 0), piece)
            yield piece

    def slot_pieces(self) -> Iterator[torch.Tensor]:
        """Made from the saved ids, which takes this table's index."""
        if self.spec.has_index:
            yield from self._read_index().slot_table()[0].split(PIECE_BYTES // 16)

    def _read_index(self) -> HashIndex:
        index = empty_index(self.spec, "cpu")
        if self.prefix + IDENTITY in self.folder.tensors:
            saved = torch.empty(self.folder.tensors[self.prefix + IDENTITY].size, dtype=torch.int64, device="cpu")
            self._read(self.prefix + IDENTITY, (0,), saved)
            check_identity(index.config, self.spec.name, saved)
        for name in _INDEX_STATE:
            self._read(self.prefix + name, (0,), getattr(index, name))
        index.refresh()  # makes the slots
        return index

    def _read(self, name: str, begin: tuple[int, ...], target: torch.Tensor) -> None:
        with told_as("checkpoint_unreadable", self.folder.path, lambda: "Nothing was written.", "read it again."):
            storage.read_into(self.folder, {name: Parts(self.folder.tensors[name].size).put(begin, target)})
