"""Exports a checkpoint without the process that trained it: tables go from the checkpoint to the file in pieces.

What the file has to answer for the sample comes from the same model around collections that hold only the rows that
the sample reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.checkpoint import storage
from recfx.checkpoint.contents import MODEL, mismatch, with_prefix
from recfx.checkpoint.directory import told_as
from recfx.checkpoint.peers import checked_directory, checked_model
from recfx.checkpoint.saved_folder import SavedFolder, open_verified
from recfx.checkpoint.settings import read_settings
from recfx.checkpoint.storage import Parts
from recfx.checkpoint.table_names import fit_names, prefix_of
from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.copy_modules import copy_modules, copy_with_tensors
from recfx.collections.kinds import CollectionKind, kind_of
from recfx.conversion.convert import convert
from recfx.discovery.sample import Sample
from recfx.errors import CheckpointError, InputError
from recfx.exporter.compare_outputs import run_model
from recfx.exporter.model_copies import fresh_copy, hashed_spec, sample_failed, with_stand_ins, with_tables
from recfx.exporter.table_sources import TableSource, empty_index
from recfx.hashing import HashConfig, HashIndex
from recfx.hashing.identity import IDENTITY, check_identity
from recfx.ir.tables import TableSpec

_Result = TypeVar("_Result")

_INDEX_STATE = ("row_ids", "row_state")

_BUILD_AS_SAVED = "build the model, and convert it, as when saving."


def export_from_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    submodule: str,
    sample: Sample,
    export: Callable[[nn.Module, Sample, Any, Tables], _Result],
) -> _Result:
    """Export what ``save_checkpoint`` has saved.

    Args:
        model: built and converted as when saving, in one process, and possibly on meta; it does not change. One that is
            not converted stands for tables without an index.
        directory: the checkpoint, saved by any number of ranks.
        submodule: the path of the model in the one that was saved; empty if it is the whole one.
        sample: one call of the model, on the CPU.
        export: writes the file, given the loaded model with small collections, the call, what the whole model answers,
            and where the tables come from.

    Raises:
        CheckpointError: as ``load_checkpoint``; ``model_on_meta``: a buffer is on meta and was not saved.
        InputError: ``id_out_of_range``, of the sample.
        ExportError: ``sample_failed``, or an error of ``export``.
    """
    root, peers = checked_model(model, "export")
    path, _ = checked_directory(directory, peers)
    converted = convert(root, verify=False, on_unsupported="keep")
    with contextlib.ExitStack() as open_files:
        with told_as("checkpoint_unreadable", path, lambda: "Nothing was written.", "make its files readable."):
            folder = open_files.enter_context(open_verified(path))
            described = storage.describe(folder)
            everything = with_prefix(described, MODEL)
            extra = read_settings(folder, described)["extra_state"]
            prefix = prefix_of(submodule, converted.state_dict(), [*everything, *extra])
            of_model = with_prefix(everything, prefix), with_prefix(extra, prefix)
            small = _load_rest(converted, folder, MODEL + prefix, *of_model)
        tables = {
            name: {
                spec.name: CheckpointTable.of(spec, folder, f"{prefix}{name}" + "." * bool(name), kind_of(collection))
                for spec in collection.tables
            }
            for name, collection in unsharded_collections(converted).items()
        }
        outputs = _answer(small, sample, tables)
        return export(small, sample, outputs, tables)


def _load_rest(
    converted: nn.Module, folder: SavedFolder, prefix: str, saved: Mapping[str, torch.Tensor], extra: Mapping[str, Any]
) -> nn.Module:
    """A copy of the model with small collections, and with everything loaded that is not in a collection.

    Args:
        converted: the model.
        folder: the data folder.
        prefix: what its names begin with in the checkpoint.
        saved: shapes and dtypes of its tensors there, by their names in the model.
        extra: what its modules save besides tensors.
    """
    collections = unsharded_collections(converted)
    built = converted.state_dict()
    fit_names(converted, built, saved, extra, _BUILD_AS_SAVED)
    small = copy_with_tensors(with_stand_ins(converted, collections))
    prefixes = tuple(f"{name}." * bool(name) for name in collections)
    loaded = {name: tensor for name, tensor in saved.items() if not name.startswith(prefixes)}
    for name, tensor in loaded.items():
        if isinstance(built[name], torch.Tensor) and built[name].shape != tensor.shape:
            raise mismatch(
                f"it was saved as {tuple(tensor.shape)}, but is {tuple(built[name].shape)}.",
                module_path=name,
                what_to_do=_BUILD_AS_SAVED,
            )
    _allocate(small, loaded)
    state: dict[str, Any] = {}
    for name, tensor in loaded.items():
        state[name] = storage.read(folder, {prefix + name: tensor})[prefix + name]
    small.load_state_dict({**state, **extra}, strict=False)
    return small


def _allocate(model: nn.Module, loaded: Mapping[str, torch.Tensor]) -> None:
    """Allocate the tensors on meta that will be loaded."""
    made: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None or not tensor.is_meta:
                    continue
                full = f"{path}." * bool(path) + name
                if full not in loaded and id(tensor) not in made:
                    raise CheckpointError(
                        "the tensor is on meta, and was not saved.",
                        reason="model_on_meta",
                        module_path=full,
                        what_to_do="build the model with only its tables on meta.",
                    )
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                registry[name] = made[id(tensor)]


def _answer(small: nn.Module, sample: Sample, tables: Tables) -> Any:
    """What the model answers with the saved rows: its collections hold those that the sample reads."""
    collections = unsharded_collections(small)
    seen: dict[str, list[KeyedJaggedTensor]] = {path: [] for path in collections}
    hooks = [
        collection.register_forward_pre_hook(
            lambda _, args, named, path=path: seen[path].extend((*args, *named.values())), with_kwargs=True
        )
        for path, collection in collections.items()
    ]
    try:
        with sample_failed():
            run_model(fresh_copy(small)[0], sample)
    finally:
        for hook in hooks:
            hook.remove()
    read = {
        id(collection): _with_rows(path, collection, [maybe_td_to_kjt(kjt, None) for kjt in seen[path]], tables[path])
        for path, collection in collections.items()
    }
    answering, _ = copy_modules(small, dict(read))
    with sample_failed():
        return run_model(fresh_copy(answering)[0], sample)


def _with_rows(
    path: str,
    collection: UnshardedCollection,
    batches: list[KeyedJaggedTensor],
    tables: Mapping[str, CheckpointTable],
) -> UnshardedCollection:
    """A collection with the saved rows of these batches' ids; other ids read zeros."""
    specs, content = [], {}
    for spec in collection.tables:
        table = tables[spec.name]
        features = [batch[name].values() for batch in batches for name in spec.feature_names]
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *(values.to("cpu", torch.int64) for values in features)])
        ids = ids.unique()
        rows = table.rows_of(ids)
        content[spec.name] = ids[rows >= 0], table.rows_at(rows[rows >= 0])
        size = max(1, len(content[spec.name][0]))
        hashing = HashConfig.raw_ids(rows=size, buckets=1)
        specs.append(replace(hashed_spec(spec, size, hashing), dtype=table.spec.dtype))
    read = with_tables(path, collection, specs)
    with torch.no_grad():
        for name, (ids, weight) in content.items():
            read.weight(name)[read.index(name).insert(ids).rows] = weight
    return read


@dataclass(eq=False)
class CheckpointTable(TableSource):
    """One table of a checkpoint, saved by any number of ranks, with the dtype that was saved.

    Args:
        folder: the data folder, verified.
        weight: name of the weight in the checkpoint.
        prefix: prefix of the names of its index's state there.
    """

    folder: SavedFolder
    weight: str
    prefix: str

    @classmethod
    def of(cls, spec: TableSpec, folder: SavedFolder, collection: str, kind: CollectionKind) -> CheckpointTable:
        """The table that ``spec`` describes, in a collection of this kind whose keys begin with ``collection``.

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
        return cls(replace(spec, dtype=saved.dtype), 0, -1, folder, weight, prefix)

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
        index = self.read_index()
        self.ids, self.side_row = len(index), int(index.side_row[0])
        return index.answer(ids)

    def rows_at(self, places: torch.Tensor) -> torch.Tensor:
        """Some rows, ``[n, dim]``, which are read one by one."""
        none = torch.empty(0, self.spec.embedding_dim, dtype=self.spec.dtype, device="cpu")
        return torch.cat([none, *(self.rows(row, row + 1) for row in places.tolist())])

    def rows(self, begin: int, end: int) -> torch.Tensor:
        piece = torch.empty(end - begin, self.spec.embedding_dim, dtype=self.spec.dtype, device="cpu")
        self._read(self.weight, (begin, 0), piece)
        return piece

    def read_index(self) -> HashIndex:
        index = empty_index(self.spec)
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


Tables = Mapping[str, Mapping[str, CheckpointTable]]
