"""``recfx.track_changes``: a trainer remembers what its files hold, so that a delta is told without reading them.

Of each row, it remembers 16 bytes: a hash of its weights, and the id that it belongs to. They are compared when a delta
is written, so a step costs nothing, and whatever writes to a table is noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from recfx.collections.collection import unsharded_collections
from recfx.collections.converted_collection import converted_collections
from recfx.errors import ExportError
from recfx.errors.argument_types import typed
from recfx.exporter.file_versions import bytes_of, tensor_of_script, value_at
from recfx.exporter.manifest import tables_as_described
from recfx.exporter.model_copies import fresh_copy
from recfx.exporter.served_collection import Part, ServedCollection, serve_collection
from recfx.exporter.serving.pool_rows import FORMATS
from recfx.exporter.serving.targets import SERVING_TARGETS
from recfx.exporter.whole_model import exported_root
from recfx.kernels.index import hash_index

_MOST_VERSIONS = 4
_STORED = {form.name: dtype for dtype, form in FORMATS.items()}


class Changed(NamedTuple):
    """Some rows or slots that differ: which, int64 ``[n]``, and their bytes now and before, ``[n, unit]``."""

    which: Tensor
    now: Tensor
    before: Tensor | None


class OfFiles:
    """What an earlier version holds, read from its files."""

    def __init__(self, script: Any) -> None:
        self._script = script

    def tensor(self, name: str) -> Tensor:
        """A tensor of the program."""
        return tensor_of_script(self._script, name).cpu()

    def changed(self, part: Part, collection: str, name: str, begin: int) -> Changed:
        """How a part of the tensor ``name``, which begins at this byte, differs from what a model holds."""
        old = bytes_of(self.tensor(name))[begin : begin + part.count * part.unit].view(part.count, part.unit)
        return compared(part, part.pieces(), old)


class Remembered:
    """What an earlier version holds, as a trainer remembers it."""

    def __init__(self, model: nn.Module, manifest: Mapping[str, Any], served: Mapping[str, ServedCollection]) -> None:
        live = fresh_copy(model)[0]
        values = {name: value_at(live, path) for name, path in manifest["state"]["tensors"].items()}
        self._tensors = {name: value.clone() for name, value in values.items() if value is not None}
        self._rows: dict[tuple[str, str], Tensor] = {}  # their hashes, by collection and table
        self._indexes: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}  # ids and states of rows
        for path, collection in served.items():
            for name, source in collection.tables.items():
                self._rows[path, name] = source.row_hashes
                if (index := source.hash_index) is not None:
                    self._indexes[path, name] = index.row_ids.clone(), index.row_state.clone()

    def tensor(self, name: str) -> Tensor:
        """As ``OfFiles.tensor``."""
        return self._tensors[name]

    def changed(self, part: Part, collection: str, name: str, begin: int) -> Changed:
        """As ``OfFiles.changed``."""
        source = part.source
        if part.kind == "rows":
            which = torch.nonzero(source.row_hashes != self._rows[collection, part.name]).view(-1)
            assert part.stored is not None
            now = part.stored(source.weight.detach()[which])
            return Changed(which, bytes_of(now).view(len(which), part.unit), None)
        index = source.hash_index
        assert index is not None
        row_ids, row_state = self._indexes[collection, part.name]
        if torch.equal(index.row_ids, row_ids) and torch.equal(index.row_state, row_state):
            nothing = torch.empty(0, part.unit, dtype=torch.uint8)
            return Changed(torch.empty(0, dtype=torch.int64), nothing, nothing)
        old, side = torch.empty(part.count, 2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        hash_index.slot_tables_(old, side, [part.count], [row_ids], [row_state], [index.lock])
        return compared(part, part.pieces(), bytes_of(old).view(part.count, part.unit))


def compared(part: Part, pieces: Iterator[Tensor], old: Tensor) -> Changed:
    """Compare the content of a part with old bytes ``[count, unit]``."""
    first, found, data = 0, [torch.empty(0, dtype=torch.int64)], [torch.empty(0, part.unit, dtype=torch.uint8)]
    for piece in pieces:
        units = bytes_of(piece).view(piece.size(0), part.unit)
        differ = torch.nonzero((units != old[first : first + len(units)]).any(1)).view(-1)
        found.append(differ + first)
        data.append(units[differ])
        first += len(units)
    which = torch.cat(found)
    return Changed(which, torch.cat(data), old[which])


_REMEMBERED: WeakKeyDictionary[nn.Module, OrderedDict[str, Remembered]] = WeakKeyDictionary()
"""The last versions that were written of each model that is tracked."""


@typed(ExportError)
def track_changes(model: nn.Module) -> None:
    """Remember, from the next export on, what the files of a model hold, so that ``export_delta`` need not read them.

    It takes 16 bytes for each row of a table, 8 if its ids are its rows, and a copy of the rest of the model, for each
    of the last four versions. A step costs nothing. Copies of the model, and a model that has loaded a checkpoint in
    another process, are not tracked: their first delta reads the base, whose chain goes on.

    Example:
        >>> model = recfx.convert(Model())
        >>> recfx.track_changes(model)
        >>> report = recfx.export(model, "model.pt", sample)
        >>> report = recfx.export_delta(model, "model.1.delta", base="model.pt")

    Args:
        model: a converted model, sharded or not; on every rank.

    Raises:
        ExportError: ``not_converted``: it has no converted collection; as ``export`` for what it cannot export.
    """
    root = exported_root(model)
    if not converted_collections(root):
        raise ExportError(
            "the model has no converted collection.",
            reason="not_converted",
            what_to_do="track what recfx.convert returns.",
        )
    _REMEMBERED.setdefault(root, OrderedDict())


def is_tracked(root: nn.Module) -> bool:
    """Whether ``track_changes`` was called for this model."""
    return root in _REMEMBERED


def remembered(root: nn.Module, manifest: Mapping[str, Any]) -> Remembered | None:
    """What is remembered of the version of a manifest, if it is."""
    versions = _REMEMBERED.get(root)
    return None if versions is None else versions.get(manifest.get("version", ""))


def remember(
    root: nn.Module, whole: nn.Module, manifest: Mapping[str, Any], served: Mapping[str, ServedCollection]
) -> None:
    """Remember that a version of a model holds what its ``whole`` form on the host holds now, with its collections as
    ``served``, and forget the oldest version.
    """
    versions = _REMEMBERED[root]
    versions[manifest["version"]] = Remembered(whole, manifest, served)
    if len(versions) > _MOST_VERSIONS:
        versions.popitem(last=False)


def served_again(model: nn.Module, manifest: Mapping[str, Any]) -> dict[str, ServedCollection]:
    """The exported graphs of a model's collections as those of a file, whose tables they must have
    (``delta_does_not_fit``).
    """
    target = next(target for target in SERVING_TARGETS if target.name == manifest["target"])
    collections = unsharded_collections(model)
    served: dict[str, ServedCollection] = {}
    for path, tables in manifest["collections"].items():
        dtypes = {table["table"]: _STORED[table["stored_as"]] for table in tables}
        if path not in collections or dtypes.keys() != {spec.name for spec in collections[path].tables}:
            raise does_not_fit(f"the model has no converted collection {path!r} with the tables of the base.")
        served[path] = serve_collection(path, collections[path], dtypes, target)
        for now, before in zip(tables_as_described(served[path]), tables, strict=True):
            if differing := [name for name in before if name != "ids" and now[name] != before[name]]:
                name = differing[0]
                raise does_not_fit(
                    f"table {before['table']!r} of {path!r} has {name}={now[name]!r}, and {before[name]!r} in the base."
                )
    return served


def does_not_fit(message: str) -> ExportError:
    """The error for a model whose changes no delta can tell."""
    return ExportError(message, reason="delta_does_not_fit", what_to_do="export a new base, and deltas after that.")
