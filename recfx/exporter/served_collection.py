"""The exported graph of one converted collection, and its big buffers, whose memory is that of a file without a name
beside the exported one, so that a table takes no memory of the process.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import fx
from tqdm import tqdm

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import rewritten
from recfx.errors import ExportError
from recfx.exporter.model_file import reserve
from recfx.exporter.row_hashes import row_hashes
from recfx.exporter.serving.find_rows import FindFrozenRows
from recfx.exporter.serving.pool_rows import FORMATS, FindAndPool, PoolRows, RowFormat
from recfx.exporter.serving.targets import ServingTarget, lower_served
from recfx.hashing import HashIndex
from recfx.ir.context import CollectionContext, FrozenIndex, TableFacts
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.tables import TableSpec
from recfx.kernels.index.slot_table import home_slots, slot_count
from recfx.kernels.lookup.quantized_rows import dequantize_rows, quantize_rows
from recfx.models.compare_models import largest_difference
from recfx.passes import export_passes, serving_passes
from recfx.passes.base import PassRecord

PIECE_BYTES = 2**22
"""The size of a piece, in bytes of the source; quantizing it takes several times as much."""

_SHOW_PROGRESS_FROM = 2**28


@dataclass(eq=False)
class TableSource:
    """One whole table: its rows, its index, how many ids that holds, and the row of id -1 (-1 if it has none)."""

    spec: TableSpec
    weight: torch.Tensor
    hash_index: HashIndex | None
    ids: int
    side_row: int

    @cached_property
    def row_hashes(self) -> torch.Tensor:
        """``row_hashes`` of the rows as they are when they are first asked for."""
        return row_hashes(self.weight)

    @property
    def index(self) -> FrozenIndex | None:
        """None if ids are rows."""
        if self.spec.hashing is None or not self.spec.has_index:
            return None
        return FrozenIndex(slot_count(self.spec.hashing.index_rows), self.side_row)

    def slot_pieces(self) -> Iterator[torch.Tensor]:
        """The slots, in order: int64 ``[slots of the piece, 2]`` each; they are made for this."""
        if self.hash_index is not None:
            yield from self.hash_index.slot_table()[0].split(PIECE_BYTES // 16)

    def longest_probe(self) -> int:
        """The most slots that finding an id of the table reads."""
        slots, begin, longest = 0 if self.index is None else self.index.slots, 0, 0
        for piece in self.slot_pieces():
            places = torch.nonzero(piece[:, 0] != -1).squeeze(1)
            if places.numel():
                distance = (begin + places - home_slots(piece[places, 0], slots)) & (slots - 1)
                longest = max(longest, int(distance.max()) + 1)
            begin += piece.size(0)
        return longest


def tables_of(collection: UnshardedCollection) -> dict[str, TableSource]:
    """The tables of a collection, by name."""
    tables: dict[str, TableSource] = {}
    for spec in collection.tables:
        index = collection.index(spec.name) if spec.name in collection.hash_indexes else None
        ids, side_row = (0, -1) if index is None else (len(index), int(index.index_buffers().side_row[0]))
        tables[spec.name] = TableSource(spec, collection.weight(spec.name), index, ids, side_row)
    return tables


@dataclass(eq=False)
class Part:
    """The stretch of a filling that belongs to one table: its rows, or its slots."""

    source: TableSource
    name: str
    kind: Literal["rows", "slots"]
    count: int  # of rows or slots
    unit: int  # bytes of each
    pieces: Callable[[], Iterator[torch.Tensor]]
    """The content, in order: a tensor ``[n, ...]`` of some rows or slots each, made for this."""
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What makes the content of some rows of the model, given as floats; None if the part holds slots."""


@dataclass(eq=False)
class Filling:
    """A buffer of a program, which is not written yet, and what its content consists of, in order."""

    buffer: torch.Tensor
    parts: list[Part]
    module: PoolRows | FindFrozenRows  # that has the buffer

    def index_facts(self) -> dict[str, Any]:
        """What the module is told about indexes besides their slots, as JSON has it; nothing if this holds rows."""
        has_slots = any(part.kind == "slots" for part in self.parts)
        names = self.module.index_attributes if has_slots else ()
        return {name: json.loads(json.dumps(getattr(self.module, name))) for name in names}


def fill(fillings: list[Filling], directory: Path) -> None:
    """Write the content of the buffers, whose memory is that of a file in this directory from now on."""
    fillings = [filling for filling in fillings if filling.buffer.numel()]
    total = sum(filling.buffer.nbytes for filling in fillings)
    is_quiet = None if total >= _SHOW_PROGRESS_FROM else True  # None: where there is no terminal
    with (
        tempfile.TemporaryFile(dir=directory) as file,
        tqdm(total=total, desc="export", unit="B", unit_scale=True, disable=is_quiet) as bar,
    ):
        reserve(file.fileno(), total)
        for buffer, parts in ((filling.buffer, filling.parts) for filling in fillings):
            begin = file.tell()
            for piece in itertools.chain.from_iterable(part.pieces() for part in parts):
                data: Any = piece.reshape(-1).view(torch.uint8).numpy()
                file.write(memoryview(data))
                bar.update(data.size)
            size = file.tell() - begin
            if size != buffer.nbytes:
                raise AssertionError(f"a buffer has {buffer.nbytes} bytes, not {size}")
            file.seek(-begin - size & 63, os.SEEK_CUR)  # tensors begin where their elements may
            file.flush()
            content = torch.from_numpy(numpy.memmap(file, mode="c", offset=begin, shape=(size,)))
            buffer.set_(content.view(buffer.dtype).view(buffer.shape))  # type: ignore[call-overload]


def fillings_of(
    path: str, graph_module: fx.GraphModule, tables: Mapping[str, TableSource], errors: dict[str, float]
) -> list[Filling]:
    """The buffers of one collection's exported graph that hold slots and rows; filling them writes ``errors``."""
    fillings: list[Filling] = []
    for module in graph_module.modules():
        if isinstance(module, PoolRows):
            for buffer, specs in module.parts():
                parts = [_rows_part(path, tables[spec.name], spec, errors) for spec in specs]
                fillings.append(Filling(buffer, parts, module))
        if isinstance(module, FindFrozenRows | FindAndPool):
            fillings.append(Filling(module.slots, [_slots_part(tables[table]) for table in module.hashed], module))
    return fillings


def _slots_part(source: TableSource) -> Part:
    slots = 0 if source.index is None else source.index.slots
    return Part(source, source.spec.name, "slots", slots, 16, source.slot_pieces)


def _rows_part(path: str, source: TableSource, spec: TableSpec, errors: dict[str, float]) -> Part:
    form, dim = FORMATS[spec.dtype], spec.embedding_dim

    def pieces() -> Iterator[torch.Tensor]:
        errors[spec.name] = 0.0
        row_bytes = dim * source.spec.dtype.itemsize
        for piece in source.weight.detach().split(max(1, PIECE_BYTES // max(1, row_bytes))):
            rows, error = checked_rows(path, spec, piece)
            errors[spec.name] = max(errors[spec.name], error)
            yield rows

    def stored(rows: torch.Tensor) -> torch.Tensor:
        return checked_rows(path, spec, rows)[0]

    return Part(source, spec.name, "rows", spec.num_embeddings, form.bytes(dim), pieces, stored)


def checked_rows(path: str, spec: TableSpec, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Rows of a table as they are stored, and the largest error of that (``rows_out_of_range``)."""
    form, dim = FORMATS[spec.dtype], spec.embedding_dim
    stored = stored_rows(rows, form)
    if rows.dtype == spec.dtype or not rows.numel():
        return stored, 0.0
    values = values_of(stored, form, dim)
    _check_range(path, spec.name, form, rows, values)
    return stored, largest_difference(rows.float(), values)


def _check_range(path: str, table: str, form: RowFormat, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Refuse finite numbers that could not be stored as such: FP16, and scales and biases, end at 65504."""
    is_lost = rows.isfinite().all(1) & ~values.isfinite().all(1)
    if is_lost.any():
        raise ExportError(
            f"rows of table {table!r}, one of which has a value of {float(rows[is_lost].abs().max()):.3g}, have no "
            f"finite value as {form.name}.",
            reason="rows_out_of_range",
            module_path=path,
            what_to_do=f"export with quantize={{{table!r}: None}}, or find out why the row has grown so much.",
        )


def stored_rows(rows: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Floats ``[n, dim]`` in the form in which a file stores them, uint8 ``[n, bytes]``."""
    if form.is_quantized:
        padded = form.columns(rows.size(1)) - rows.size(1)
        return quantize_rows(torch.cat([rows, rows[:, -1:].expand(-1, padded)], dim=1) if padded else rows, form.bits)
    dtype = torch.float16 if form.bits == 16 else torch.float32
    return rows.to(dtype).contiguous().resolve_neg().view(torch.uint8)


def values_of(stored: torch.Tensor, form: RowFormat, dim: int) -> torch.Tensor:
    """The values of stored rows, float32 ``[n, dim]``; the inverse of ``stored_rows``."""
    if form.is_quantized:
        return dequantize_rows(stored, form.columns(dim), form.bits)[:, :dim]
    return stored.view(torch.float16 if form.bits == 16 else torch.float32).float()


Quantized = Literal["fp16", "int8", "int4"] | None
"""How rows are stored; None: as they are."""

_QUANTIZED = {form.name: dtype for dtype, form in FORMATS.items() if dtype != torch.float32}
"""The dtype of quantized rows, by what ``quantize`` calls it."""


def stored_dtypes(
    collections: Mapping[str, tuple[TableSpec, ...]], quantize: Quantized | Mapping[str, Quantized]
) -> dict[str, dict[str, torch.dtype]]:
    """The dtype of stored rows, by collection and table; by default the table's own, or float32 for want of it."""
    chosen, of_others = (quantize, None) if isinstance(quantize, Mapping) else ({}, quantize)
    for choice in (*chosen.values(), of_others):
        if choice is not None and (not isinstance(choice, str) or choice not in _QUANTIZED):
            raise ExportError(
                f"quantize={choice!r} is not a format of rows.",
                reason="invalid_argument",
                what_to_do="pass None, 'fp16', 'int8', 'int4', or a dict of these by table.",
            )
    names = {spec.name for tables in collections.values() for spec in tables}
    paths = {f"{path}.{spec.name}" for path, tables in collections.items() for spec in tables}
    unknown = sorted(str(name) for name in chosen if name not in names | paths)
    if unknown:
        raise ExportError(
            f"quantize names table {unknown[0]!r}, which no converted collection has.",
            reason="invalid_argument",
            what_to_do=f"name some of: {', '.join(sorted(names))}.",
        )

    def stored(path: str, spec: TableSpec) -> torch.dtype:
        choice = chosen.get(f"{path}.{spec.name}", chosen.get(spec.name, of_others))
        return _QUANTIZED[choice] if choice else (torch.float16 if spec.dtype == torch.float16 else torch.float32)

    return {path: {spec.name: stored(path, spec) for spec in tables} for path, tables in collections.items()}


@dataclass(frozen=True)
class ServedCollection:
    """What takes the place of a converted collection in an exported program: its graph, whose big buffers ``fillings``
    has. ``stored`` are its tables, with the dtype of stored rows; once the buffers are filled, ``errors`` has the
    largest difference between stored rows and the model's, by table.
    """

    path: str
    graph_module: fx.GraphModule
    records: list[PassRecord]
    fillings: list[Filling]
    tables: Mapping[str, TableSource]
    stored: tuple[TableSpec, ...]
    errors: dict[str, float]


def serve_collection(
    path: str, collection: UnshardedCollection, dtypes: Mapping[str, torch.dtype], target: ServingTarget
) -> ServedCollection:
    """Run the export passes on the graph of a collection, which does not change."""
    tables = tables_of(collection)
    facts = {name: _facts(source, dtypes[name], target.counts_probes) for name, source in tables.items()}
    context = CollectionContext(
        path, collection.tables, facts, dict.fromkeys(facts, 0), collection.is_weighted(),
        need_indices=collection._need_indices,
    )  # fmt: skip
    made = rewritten(
        OperatorGraph.of(context, target), [*export_passes(collection.passes), *serving_passes({path: dtypes})]
    )
    graph_module = lower_served(made, target)
    stored = tuple(spec for module in graph_module.modules() if isinstance(module, PoolRows) for spec in module.specs)
    errors: dict[str, float] = {}
    fillings = fillings_of(path, graph_module, tables, errors)
    return ServedCollection(path, graph_module, list(made.records), fillings, tables, stored, errors)


def _facts(source: TableSource, stored: torch.dtype, counts_probes: bool) -> TableFacts:
    """What a file's graph is told about a table: its index, and one dtype for all that may share a lookup. Rows that
    are not pooled share one if FBGEMM reads the same number of columns.
    """
    spec, index = source.spec, source.index
    is_wider = not spec.is_pooled and FORMATS[stored].columns(spec.embedding_dim) > spec.embedding_dim
    if index is not None and counts_probes:
        index = replace(index, longest_probe=source.longest_probe())
    dtype = stored if is_wider else torch.float32
    return TableFacts(spec.num_embeddings, spec.embedding_dim, dtype, "meta", index=index)
