"""``recfx.export``: from a trained converted model to a file that a server loads without Python."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from recfx.collections.collection import unsharded_collections
from recfx.collections.raw_ids import RemappedRows
from recfx.collections.sharding.ranks_agree import on_all_ranks
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap
from recfx.conversion.convert import convert
from recfx.errors import Diagnostic, ExportError, Severity, told_by
from recfx.errors.argument_types import typed
from recfx.exporter.arguments import signature_of
from recfx.exporter.compare_outputs import NONE, ModelCall, changed_buffer, difference_of, other_batches, run_copy
from recfx.exporter.file_versions import followed_state, new_version
from recfx.exporter.load import manifest_of_file
from recfx.exporter.loaded_program import check_reads_pt2
from recfx.exporter.manifest import make_manifest
from recfx.exporter.model_copies import device_of, loaded_copy, on_host, uncounted
from recfx.exporter.model_file import Program, as_path, check_target, destination, disk_errors, write_file
from recfx.exporter.model_repository import configuration, write_repository
from recfx.exporter.patterns import check_alike, return_pattern
from recfx.exporter.report import ExportReport, TableSize
from recfx.exporter.script_program import script_programs
from recfx.exporter.served_collection import Quantized, ServedCollection, fill, serve_collection, stored_dtypes
from recfx.exporter.serving.pool_rows import FORMATS
from recfx.exporter.serving.targets import FOR_DEVICES, NATIVE, ServingTarget, target_of
from recfx.exporter.state import Unchanged
from recfx.exporter.traced_program import traced_programs
from recfx.exporter.tracked import is_tracked, remember, served_again
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
from recfx.kernels.build import library
from recfx.kernels.build.private_files import new_file
from recfx.models.sample import Sample

_FORMATS: dict[str, tuple[Callable[[ModelCall], Iterator[Program | Diagnostic]], str, str]] = {
    "torchscript": (script_programs, "TorchScript", "not_scriptable"),
    "pt2": (traced_programs, "torch.export", "not_exportable"),
}
"""By format: what makes programs that may become the file; their compiler; and the reason code if there is none."""


@typed(ExportError)
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    sample: Any,
    *,
    quantize: Quantized | Mapping[str, Quantized] = None,
    format: Literal["torchscript", "pt2"] = "torchscript",
    portable: bool = True,
    forward: Literal["model", "tensors", "positional"] = "model",
    model_repository: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    submodule: str = "",
    device: torch.device | str | None = None,
) -> ExportReport:
    """Write a model, as it answers in eval mode, into a file with the hash state inside.

    The model does not change. Nothing is left at ``path`` unless the file answers the sample as the model does.

    Example:
        >>> report = recfx.export(recfx.convert(Model()), "model.pt", sample, quantize="int8")
        >>> [(table.table, table.stored_as) for table in report.tables]
        [('users', 'int8')]
        >>> recfx.load("model.pt")(batch).shape
        torch.Size([2, 1])

    Args:
        model: a converted model; one that is not converted is exported as ``convert`` with a sample would convert it.
            If its collections are sharded, every rank calls this, and rank 0 gathers the tables and writes the file:
            it needs memory for all of them, the other ranks for one or two at a time. The file is compared on rank 0's
            sample.
        path: the file. One that exists is replaced in one step, so that a server may be reading it; a symbolic link
            stays, and the file that it names is replaced.
        sample: one call of the model, as for ``convert``. Batch size and numbers of ids are not fixed by it.
        quantize: how rows are stored: ``None`` (as they are), ``"fp16"``, ``"int8"`` or ``"int4"``; or one of these for
            each table by name.
        format: ``"torchscript"``, or ``"pt2"`` for a program of ``torch.export``. Writing that takes memory for
            two copies of the rows of the biggest collection, because torch saves no tensor in pieces.
        portable: use only operators of torch and of FBGEMM. If not, ids are found and rows looked up by recfx's own C++
            operator, which is faster; servers without Python load ``report.libraries`` before the file. For CUDA and
            NPUs, rows are looked up by recfx's kernels in Triton instead; such a file is loaded by ``recfx.load``
            alone, and the report says so, and which lookups are left to ATen.
        forward: what ``forward`` of a TorchScript file takes: ``"model"``, what the model takes; ``"tensors"``, a
            dictionary of tensors by name, as ``serve``; ``"positional"``, the same tensors, in the order of
            ``LoadedModel.inputs``. The last two return a tensor, or a tuple of tensors in the order of ``serve``, for
            hosts that know nothing of ``KeyedJaggedTensor``. ``recfx.load`` and the C++ server take any.
        model_repository: a directory of Triton Inference Server, in which the file becomes the next version of the
            model of its name, beside ``config.pbtxt``; needs ``forward="tensors"`` or ``"positional"``.
        checkpoint: export what ``save_checkpoint`` saved in this directory, on any number of ranks, instead of what
            ``model`` holds. The model is built, unsharded, and converted as when saving; it is best on meta, as the
            checkpoint is loaded into a copy of it, with all its tables.
        submodule: with ``checkpoint``, the path of ``model`` in the one that was saved, such as ``"ranker"`` if it was
            wrapped with its loss for training; names of DistributedDataParallel and the like may be left out.
        device: the kind of device that serves the file, such as ``"cpu"`` or ``"npu"``; default: where the tables are.
            On the CPU, FBGEMM looks up; files for others have ATen's operators alone, and run on the CPU as well.

    Returns:
        the report: sizes and errors per table, graph, passes.

    Raises:
        ExportError: ``invalid_argument``, ``unsupported_argument``, ``unsupported_output``, ``not_scriptable``,
            ``not_exportable``, ``no_library``, ``no_pt2``, ``sample_failed``, ``cannot_write``, ``traced_graph``,
            ``rows_out_of_range``, ``model_on_meta``, ``changes_state``; of a sharded model, on all ranks, also
            ``ranks_differ``, ``other_rank_failed``, ``several_process_groups``, ``no_process_group``,
            ``model_is_sharded`` (by TorchRec alone, or with ``checkpoint``).
        CheckpointError: as ``load_checkpoint``; also ``model_on_meta``: a tensor is on meta that was not saved.
        ConversionError: the model is not converted, and cannot be; ``fully_sharded``.
    """
    root = exported_root(model)
    group = group_of_root(root, "export")
    call, place = Sample.of(sample), device_of(root).type

    def check() -> list[str]:
        """Check the arguments, and return them as texts that are the same for the same arguments."""
        if not isinstance(device, (str, torch.device, type(None))) or str(device).partition(":")[0] in ("", "meta"):
            raise _invalid(f"device={device!r} cannot serve a file.", "pass a kind of device, such as 'cpu' or 'npu'.")
        if submodule and checkpoint is None:
            message = f"submodule={submodule!r} is a part of a checkpoint."
            raise _invalid(message, "pass checkpoint=, or the submodule.")
        if checkpoint is not None and group is not None:
            raise ExportError(
                "the model is sharded.",
                reason="model_is_sharded",
                what_to_do="with checkpoint=, pass the unsharded model: any number of ranks may have saved it.",
            )
        _serving_target(format, portable, str(device or ("cpu" if place == "meta" else place)))
        if forward not in ("model", "tensors", "positional") or (forward != "model" and format != "torchscript"):
            message = f"forward={forward!r} is nothing that a file of format {format!r} takes."
            raise _invalid(message, "pass 'model'; for TorchScript also 'tensors' or 'positional'.")
        if model_repository is not None and forward == "model":
            message = "Triton Inference Server calls forward with tensors, not with what the model takes."
            raise _invalid(message, "pass forward='tensors' or forward='positional' with model_repository=.")
        if group is None or group.rank() == 0:
            check_target(as_path(path))
        stored = sorted(quantize.items(), key=str) if isinstance(quantize, Mapping) else quantize
        return [str(value) for value in (as_path(path), stored, format, portable, forward, model_repository, device)]

    check_on_ranks(group, check, "export")
    gathered = gathered_tables(root)

    def write() -> ExportReport | None:
        if group is not None and group.rank() != 0:
            return None
        with ONE_AT_A_TIME:
            whole = root if checkpoint is None else loaded_copy(root, checkpoint, submodule)
            whole, whole_call = whole_model(whole, call, group, gathered)
            with Unchanged(whole):
                converted = unwrap(convert(whole, whole_call, verify=False, on_unsupported="keep"))
            converted = converted.python_model if isinstance(converted, WholeGraph) else converted
            kind = device_of(converted).type if group is None else place
            refuse_meta(kind)
            serving = _serving_target(format, portable, str(device or kind))
            on_the_host, whole_call = on_host(converted, whole_call)
            into = None if model_repository is None else as_path(model_repository)
            report = _export(as_path(path), quantize, serving, on_the_host, whole_call, forward, into)
            if is_tracked(root) and report.can_be_followed:
                manifest = manifest_of_file(as_path(path), whole=False)
                remember(root, on_the_host, manifest, served_again(on_the_host, manifest))
            return report

    report = on_all_ranks(group, write, as_sent)[0]
    assert report is not None
    return report


def _export(
    target: Path,
    quantize: Quantized | Mapping[str, Quantized],
    serving: ServingTarget,
    converted: nn.Module,
    sample: Sample,
    forward: str,
    repository: Path | None,
) -> ExportReport:
    """Export a converted model, whose tables are on the host."""
    for path, module in converted.named_modules():
        if isinstance(module, RemappedRows):
            raise ExportError(
                "return_remapped_features asks for the rows of ids, which files do not return.",
                reason="rows_not_exported",
                module_path=path.rpartition(".")[0],
                what_to_do="build the managed-collision collection without return_remapped_features; convert again.",
            )
    with uncounted(converted):
        try:
            outputs = run_copy(converted, sample)
        except ExportError:  # `changes_state`
            raise
        except Exception as error:  # whatever the user's code raises
            message, what_to_do = told_by(error, "pass one call of the model that works in eval mode.")
            message = f"the model cannot be called with the sample: {message}"
            raise ExportError(message, reason="sample_failed", what_to_do=what_to_do) from error
        signature, returns = signature_of(converted, sample), return_pattern(outputs)
        other_calls: dict[str, Sample] = {}
        notes: list[Diagnostic] = []
        for name, other_call, answer in other_batches(converted, sample):
            try:
                check_alike(returns, return_pattern(answer), name)
            except ExportError:
                if name != NONE:  # of no samples, torch's own modules may return something else
                    raise
                continue
            other_calls[name] = other_call
        collections = unsharded_collections(converted)
        # A program of torch.export takes the features of the sample alone, and what is returned has their names.
        if serving.format == "pt2" or any(leaf.kind == "kjt" for leaf in returns.leaves()):
            signature = replace(signature, exact=tuple(leaf.name for leaf in signature.leaves() if leaf.kind == "kjt"))
        dtypes = stored_dtypes({name: collection.tables for name, collection in collections.items()}, quantize)
        served = {
            id(collection): serve_collection(name, collection, dtypes[name], serving)
            for name, collection in collections.items()
        }
        fillings = [filling for collection in served.values() for filling in collection.fillings]
        with disk_errors(target):
            fill(fillings, destination(target).parent)
        changed = changed_buffer(converted, [sample, *other_calls.values()])
        call = ModelCall(converted, served, sample, other_calls, outputs, signature, returns, changed, forward)
        if changed is not None:
            message = "a call changes this buffer, in the file as well: answers may depend on the calls before."
            what_to_do = "give each thread that serves the file its own copy, or leave the buffer alone in eval mode."
            notes.append(Diagnostic("keeps_state", changed, message, what_to_do, Severity.WARNING))
        for made in _FORMATS[serving.format][0](call):
            written = made if isinstance(made, Diagnostic) else _write(target, serving, made, call, notes)
            if isinstance(written, ExportReport):
                if repository is not None and isinstance(made, Program):
                    write_repository(repository, target, configuration(target.stem, call, made.named))
                return written
            call.failures.append(written)
    raise _not_exported(converted, call.failures, serving.format)


def _invalid(message: str, what_to_do: str) -> ExportError:
    return ExportError(message, reason="invalid_argument", what_to_do=what_to_do)


def _serving_target(format: str, portable: bool, device: str) -> ServingTarget:
    """Which modules serve the nodes of the file; refuses arguments that are wrong."""
    if not isinstance(format, str) or format not in _FORMATS:
        raise _invalid(f"format={format!r} is not a format.", f"pass one of: {', '.join(_FORMATS)}.")
    if format == "pt2":
        check_reads_pt2()
    target = target_of(format, portable, device.partition(":")[0])
    if target is None:
        raise _invalid(
            f"there are no files of format={format!r} and portable={portable} for {device}.",
            "pass format='torchscript' and portable=True.",
        )
    if target is NATIVE and not library.load():
        raise ExportError(
            f"recfx's C++ operators are missing: {library.why_not()}.",
            reason="no_library",
            what_to_do=f"export with portable=True, or {library.WHAT_TO_DO}",
        )
    return target


def _write(
    target: Path, serving: ServingTarget, program: Program, call: ModelCall, about: list[Diagnostic]
) -> ExportReport | Diagnostic:
    """Write the file, and put it in its place if it answers as the model does; else say why not."""
    own = [name for name in program.operators if name.startswith("recfx::")]
    buffers = {buffer.data_ptr() for buffer in program.buffers().values() if buffer.numel()}
    present: list[ServedCollection] = []
    notes = _of_devices(program, own) if serving in FOR_DEVICES else []
    for collection in call.served.values():
        if any(filling.buffer.data_ptr() in buffers for filling in collection.fillings):
            present.append(collection)
            notes += collection.records[-1].declined  # by ``lower``
        else:
            message = "the model does not call this collection in eval mode, so its tables are not in the file."
            notes.append(Diagnostic("collection_left_out", collection.path, message))
    state = followed_state(program, call)
    version = {**new_version(), "state": state}
    manifest = partial(make_manifest, call, present, version, portable=not own, target=serving)
    with contextlib.ExitStack() as stack:
        with disk_errors(target):
            file = stack.enter_context(new_file(destination(target)))
            write_file(program.save, program.size, manifest, file.path)
        error = difference_of(call, program.named, program.buffers)
        if isinstance(error, Diagnostic):
            return error
        size = file.path.stat().st_size
        with disk_errors(target):
            file.put_in_place()
    path = library.loaded_path() if own and serving.fused is not None else None
    return ExportReport(
        path=target, format=serving.format, bytes=size,
        tables=tuple(size for collection in present for size in _sizes(collection)), graph=program.graph,
        passes={collection.path: collection.records for collection in present}, output_error=error,
        libraries=() if path is None else (path,), notes=(*call.failures, *notes, *about),
        can_be_followed=state is not None and not state["unfollowed"],
    )  # fmt: skip


def _of_devices(program: Program, own: list[str]) -> list[Diagnostic]:
    """Notes on a file for a device that also calls other operators than ATen's: recfx's, or the model's own."""
    notes = []
    if own:
        message = f"the file calls {', '.join(own)}, which Python registers: a server without Python cannot load it."
        what_to_do = "serve it with recfx.load where Python and Triton for the device are, or pass portable=True."
        notes.append(Diagnostic("needs_python", "", message, what_to_do, Severity.WARNING))
    foreign = sorted(name for name in program.operators if not name.startswith(("aten::", "prim::", "recfx::")))
    if foreign:
        message = f"outside converted collections, the model calls {', '.join(foreign)}, which devices may not have."
        what_to_do = "try the file on the device, or replace what calls them, such as TorchRec's regroup."
        notes.append(Diagnostic("operators_of_the_model", "", message, what_to_do, Severity.WARNING))
    return notes


def _sizes(served: ServedCollection) -> Iterator[TableSize]:
    for spec in served.stored:
        source, form = served.tables[spec.name], FORMATS[spec.dtype]
        index = source.index
        yield TableSize(
            collection=served.path, table=spec.name, stored_as=form.name, rows=spec.num_embeddings, ids=source.ids,
            row_bytes=spec.num_embeddings * form.bytes(spec.embedding_dim),
            slot_bytes=0 if index is None else 16 * index.slots,
            bytes_before=spec.num_embeddings * spec.embedding_dim * source.spec.dtype.itemsize,
            error=served.errors.get(spec.name, 0.0),
        )  # fmt: skip


def _not_exported(converted: nn.Module, failures: list[Diagnostic], format: str) -> ExportError:
    _, compiler, reason = _FORMATS[format]
    for path, module in converted.named_modules():
        is_cause = all(failure.path in ("", path) or failure.path.startswith(f"{path}.") for failure in failures)
        if isinstance(module, BaseManagedCollisionEmbeddingCollection) and is_cause:
            return ExportError(
                f"{compiler} cannot express the model, in which {type(module).__name__} was kept.",
                reason="managed_collision",
                module_path=path,
                what_to_do="export what recfx.convert(model, managed_collisions='convert') returns.",
            )
    ways = list(dict.fromkeys(str(failure) for failure in failures))
    return ExportError(
        f"{compiler} cannot express the model. " + " ".join(f"({number}) {way}" for number, way in enumerate(ways, 1)),
        reason=reason,
        module_path=next((failure.path for failure in reversed(failures) if failure.path), ""),
        what_to_do="change what the message is about, or keep it out of the model that is exported.",
    )
