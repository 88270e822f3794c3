"""``recfx.export_delta``: what has changed in a model since a file was written, as a file that servers apply to it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recfx.collections.sharding.ranks_agree import on_all_ranks
from recfx.errors import ExportError
from recfx.errors.argument_types import typed
from recfx.exporter.file_versions import changed_read, new_version, same_bits, value_at
from recfx.exporter.load import LoadedModel, load, manifest_of_file
from recfx.exporter.manifest import rewritten_manifest, tables_as_described
from recfx.exporter.model_copies import device_of, fresh_copy, on_host
from recfx.exporter.model_file import as_path, check_target, destination, disk_errors, write_file
from recfx.exporter.report import DeltaReport, TableChanges
from recfx.exporter.script_program import save_script, script_of_tensors
from recfx.exporter.served_collection import Part, ServedCollection
from recfx.exporter.tracked import OfFiles, Remembered, does_not_fit, is_tracked, remember, remembered, served_again
from recfx.exporter.whole_model import (
    ONE_AT_A_TIME,
    as_sent,
    check_on_ranks,
    exported_root,
    gathered_tables,
    group_of_root,
    refuse_meta,
    whole_model,
)
from recfx.kernels.build.private_files import new_file
from recfx.models.sample import Sample

_FREE = -1


@typed(ExportError)
def export_delta(model: nn.Module, path: str | os.PathLike[str], base: str | os.PathLike[str]) -> DeltaReport:
    """Write what has changed in a model since ``base`` was written: rows of tables, their ids, and the other parameters
    and buffers of the program that differ. A server that applies it answers as a file that is exported now would.

    The model does not change, and must not be trained meanwhile in another thread: call this between two steps. Without
    ``track_changes``, what the base holds is read from its files.

    Example:
        >>> model = recfx.convert(Model())
        >>> report = recfx.export(model, "model.pt", sample)
        >>> _ = model(batch)  # and an optimizer's step
        >>> report = recfx.export_delta(model, "model.1.delta", base="model.pt")
        >>> recfx.load("model.pt").apply("model.1.delta").manifest["number"]
        1

    Args:
        model: the model that was exported to ``base``, or one that was built as it was and has loaded its state. If its
            collections are sharded, every rank calls this, as ``export``.
        path: the file of the delta. One that exists is replaced in one step.
        base: the file that the servers have: of ``export``, of ``merge_deltas``, or the last delta. It must be
            TorchScript. Rows are quantized as they are there.

    Returns:
        what has changed, by table.

    Raises:
        ExportError: ``base_unknown``: the base, or a file before it, cannot be read, is of format pt2, or was written
            by a version of recfx without deltas; ``delta_does_not_fit``: the model has other tables or tensors than
            the base; ``not_followed``: the base's program holds a tensor that the model has under no path; as
            ``export``: ``invalid_argument``, ``cannot_write``, ``rows_out_of_range``, ``ranks_differ``,
            ``other_rank_failed``, ``model_is_sharded``, ``several_process_groups``, ``no_process_group``,
            ``model_on_meta``.
    """
    begin = time.perf_counter()
    root = exported_root(model)
    group = group_of_root(root, "export_delta")

    def check() -> list[str]:
        if group is None or group.rank() == 0:
            check_target(as_path(path))
        return [str(as_path(path)), str(as_path(base, "base"))]

    check_on_ranks(group, check, "export_delta")
    gathered = gathered_tables(root)

    def write() -> DeltaReport | None:
        if group is not None and group.rank() != 0:
            return None
        with ONE_AT_A_TIME:
            refuse_meta(device_of(root).type)
            whole = on_host(*whole_model(root, Sample(), group, gathered))[0]
            return _write(root, whole, as_path(path), as_path(base, "base"), begin)

    report = on_all_ranks(group, write, as_sent)[0]
    assert report is not None
    return report


def _write(root: nn.Module, model: nn.Module, path: Path, base: Path, begin: float) -> DeltaReport:
    manifest, old = _version_at(base, root)
    served = served_again(model, manifest)
    delta = _Changes(old, manifest["state"])
    for name, (where, number) in manifest["state"]["tables"].items():
        delta.compare_filling(name, served[where], number)
    live = fresh_copy(model)[0]
    if changed := changed_read(live, manifest["state"]["reads"]):
        raise does_not_fit(f"the model reads {changed}, whose program has that for ever.")
    for name, where in manifest["state"]["tensors"].items():
        delta.compare_tensor(name, value_at(live, where), where)
    after = os.path.relpath(destination(base), destination(path).parent)
    lists = manifest["state"]["lists"]
    described = {"parent": manifest["version"], "after": after, **delta.described(), "lists": lists}
    state = {**manifest["state"], "attributes": delta.attributes}
    tables = {where: tables_as_described(collection) for where, collection in served.items()}
    written = {**manifest, **new_version(manifest), "state": state, "collections": tables, "delta": described}
    size = sum(tensor.nbytes + 64 for tensor in delta.tensors.values())  # up to the next multiple
    save_with_manifest(script_of_tensors(delta.tensors), size, written, path)
    if is_tracked(root):
        remember(root, model, written, served)
    return DeltaReport(
        path=path, version=written["version"], number=written["number"], bytes=path.stat().st_size,
        seconds=time.perf_counter() - begin, tables=tuple(delta.of_table.values()), tensors=tuple(described["tensors"]),
    )  # fmt: skip


def save_with_manifest(script: Any, size: int, manifest: Mapping[str, Any], path: Path) -> None:
    """Save a module with a manifest as a file, which takes the place of the one at ``path`` in one step."""
    with disk_errors(path), new_file(destination(path)) as file:
        write_file(partial(save_script, script), size, partial(rewritten_manifest, manifest), file.path)
        file.put_in_place()


def _version_at(base: Path, root: nn.Module) -> tuple[dict[str, Any], OfFiles | Remembered]:
    """The manifest of a base or of a delta, and what its version holds, which is read unless it is remembered."""
    try:
        manifest = manifest_of_file(base, whole=False)
        old = remembered(root, manifest)
        return _followed(manifest, base), OfFiles(_load_chain(base).script) if old is None else old
    except ExportError as error:
        if error.reason in ("base_unknown", "not_followed"):
            raise
        raise _unknown(f"{base} cannot be read: {error}") from error


def _followed(manifest: dict[str, Any], base: Path) -> dict[str, Any]:
    """The manifest, if a delta may follow it."""
    state = manifest.get("state")
    if state is None:
        why = "of format pt2" if manifest.get("format") == "pt2" else "of a version of recfx without deltas"
        raise _unknown(f"{base} is {why}.")
    if state["unfollowed"]:
        raise ExportError(
            f"the program of {base} holds {state['unfollowed'][0]!r}, which is no tensor that the model has at a "
            "path: nobody can tell whether it has changed.",
            reason="not_followed",
            what_to_do="make the tensor a parameter or a buffer of the module that reads it, and export again.",
        )
    return manifest


def _unknown(message: str) -> ExportError:
    return ExportError(
        message, reason="base_unknown", what_to_do="export a new base of format torchscript, and deltas after that."
    )


def _load_chain(path: Path) -> LoadedModel:
    """The model of a base, or of a delta: the base that it began with, and all deltas up to this one. Some of them may
    have been merged with the base in its place since.
    """
    deltas: dict[str, Path] = {}  # by version, the last one first
    parent = None
    while "delta" in (manifest := manifest_of_file(path)):
        if parent not in (None, manifest["version"]):
            raise _unknown(f"{path} has been replaced since the delta after it was written.")
        deltas[manifest["version"]], parent = path, manifest["delta"]["parent"]
        path = Path(os.path.normpath(destination(path).parent / manifest["delta"]["after"]))
    loaded = load(path)
    follow = itertools.takewhile(lambda version: version != loaded.manifest.get("version"), deltas)
    for version in reversed(list(follow)):
        loaded.apply(deltas[version])
    return loaded


class _Changes:
    """What differs between a model and the file of an earlier version of it."""

    def __init__(self, old: OfFiles | Remembered, state: Mapping[str, Any]) -> None:
        self._old = old
        self.attributes = dict(state["attributes"])
        self._changed: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._stretches: list[dict[str, Any]] = []
        self._whole: dict[str, str] = {}
        self.of_table: dict[tuple[str, str], TableChanges] = {}

    def compare_filling(self, name: str, served: ServedCollection, number: int) -> None:
        """Compare a tensor of the program that holds rows or slots."""
        filling, begin = served.fillings[number], 0
        for part in filling.parts:
            self._add(name, begin, served.path, part)
            begin += part.count * part.unit
        if facts := filling.index_facts():
            where = name.rpartition(".")[0]
            if self.attributes.get(where) != facts:
                self.attributes[where] = self._changed[where] = facts

    def _add(self, name: str, begin: int, collection: str, part: Part) -> None:
        changes = self.of_table.setdefault((collection, part.name), TableChanges(collection, part.name))
        changed = self._old.changed(part, collection, name, begin)
        if not changed.which.numel():
            return
        if part.kind == "rows":
            changes.rows += changed.which.numel()
        else:
            assert changed.before is not None
            changes.new, changes.removed = _new_and_removed(changed.before, changed.now)
        which, data = f"which_{len(self._stretches)}", f"data_{len(self._stretches)}"
        self.tensors[which] = changed.which.int() if part.count < 2**31 else changed.which
        self.tensors[data] = changed.now
        changes.bytes += changed.now.nbytes + self.tensors[which].nbytes
        self._stretches.append({
            "tensor": name, "begin": begin, "count": part.count, "unit": part.unit, "table": part.name,
            "kind": part.kind, "which": which, "data": data,
        })  # fmt: skip

    def compare_tensor(self, name: str, value: torch.Tensor | None, where: str) -> None:
        """Compare a tensor that is no table."""
        old = self._old.tensor(name)
        if value is None or value.dtype != old.dtype or value.shape != old.shape:
            what = "nothing" if value is None else f"{value.dtype} {list(value.shape)}"
            raise does_not_fit(f"the model has {what} at {where!r}, the base {old.dtype} {list(old.shape)}.")
        if not same_bits(value, old):
            self._whole[name] = f"tensor_{len(self._whole)}"
            self.tensors[self._whole[name]] = value.clone()

    def described(self) -> dict[str, Any]:
        """What a manifest says about the changes."""
        return {"stretches": self._stretches, "tensors": self._whole, "attributes": self._changed}


def _new_and_removed(old: torch.Tensor, new: torch.Tensor) -> tuple[int, int]:
    """How many ids are in some slots that were not in them before, and the other way round; bytes ``[n, 16]`` each."""
    ids = [slots.contiguous().view(torch.int64).view(-1, 2) for slots in (old, new)]
    before, after = (slots[slots[:, 1] != _FREE, 0] for slots in ids)
    return int((~torch.isin(after, before)).sum()), int((~torch.isin(before, after)).sum())


@typed(ExportError)
def merge_deltas(
    base: str | os.PathLike[str],
    deltas: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    path: str | os.PathLike[str],
) -> None:
    """Write a base with the deltas that follow it, in order, as one file: it answers as a file that was exported when
    the last delta was, and the deltas that follow that one can be applied to it.

    Example:
        >>> model = recfx.convert(Model())
        >>> report = recfx.export(model, "model.pt", sample)
        >>> report = recfx.export_delta(model, "model.1.delta", base="model.pt")
        >>> recfx.merge_deltas("model.pt", ["model.1.delta"], "merged.pt")

    Args:
        base: a file of ``export``, of format torchscript, or of this function.
        deltas: files of ``export_delta``, or one of them.
        path: the file that is written, in one step. It may be ``base``.

    Raises:
        ExportError: as ``LoadedModel.apply``, ``load`` and ``export`` for what they read and write.
    """
    first, target = as_path(base, "base"), as_path(path)
    several = deltas if isinstance(deltas, Sequence) and not isinstance(deltas, str) else [deltas]
    follow = [as_path(delta, "deltas") for delta in several]
    check_target(target)
    loaded, size = load(first), first.stat().st_size
    for delta in follow:
        loaded.apply(delta)
    save_with_manifest(loaded.script, size, loaded.manifest, target)
