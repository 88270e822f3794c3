"""``recfx.load``: an exported file, called as the model was."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401  registers the operators that files use
import torch
from torch import nn

from recfx.collections.wrappers import usable_device
from recfx.errors import ConversionError, ExportError, few, plural
from recfx.errors.argument_types import typed
from recfx.exporter.arguments import check_inputs, input_errors
from recfx.exporter.file_versions import CHANGING, check_follows, next_version
from recfx.exporter.loaded_program import load_traced, names_of
from recfx.exporter.manifest import OPERATOR_VERSIONS, pattern_from, read_manifest, signature_from, without_checksum
from recfx.exporter.model_file import MANIFEST_RECORD, ModelFile, as_path, content_checksum, open_model_file
from recfx.exporter.patterns import put_together
from recfx.exporter.serving.targets import FOR_DEVICES, TRITON
from recfx.kernels.build import library
from recfx.lowering.triton import target as triton_target
from recfx.versions.differences import let_files_take_batches

_APPLYING = threading.Lock()
"""Held while a delta is applied: of two threads that apply one, the second one is told that it is out of order."""


@typed(ExportError)
def load(path: str | os.PathLike[str], device: torch.device | str | int | None = None) -> LoadedModel:
    """Load a file that ``export`` has written, check that it is whole, and return the model.

    The file is opened once, so that another may take its place meanwhile. A TorchScript file runs nothing but its
    TorchScript code: the manifest is JSON text, and nothing is unpickled by Python. A pt2 file is read by
    ``torch.export``, which evaluates expressions for sizes that are in the file; load only pt2 files whose origin is
    known.

    Example:
        >>> recfx.load("model.pt")(batch).shape  # recfx.export has written the file
        torch.Size([2, 1])

    Args:
        path: the file.
        device: where its tensors go; default: the CPU. Others need a file that was exported for a device.

    Raises:
        ExportError: ``invalid_argument``, ``device_unavailable``, ``no_file``, ``cannot_read``, ``damaged_file``,
            ``not_exported``, ``newer_format``, ``older_format``, ``other_hash``, ``no_library``, ``no_pt2``,
            ``no_triton``, ``no_tiling_table``, ``other_operators``, ``wrong_device``, ``cannot_load``.
    """
    target = _place(device)
    with open_model_file(as_path(path)) as file:
        manifest = _checked_manifest(file)
        if "delta" in manifest:
            raise ExportError(
                f"{file.path} is a delta, which holds what has changed alone.",
                reason="is_a_delta",
                what_to_do="load its base, and call apply() of what that returns with the deltas in order.",
            )
        if target.type != "cpu" and manifest.get("target") not in [serving.name for serving in FOR_DEVICES]:
            raise ExportError(
                f"{file.path} was exported for the CPU: its operators do not run on {target}.",
                reason="wrong_device",
                what_to_do=f"export the model with device={target.type!r}, or load it without a device.",
            )
        if not manifest.get("portable", True):
            _check_operators(file, manifest, target)
        try:
            if manifest.get("format") == "pt2":
                return LoadedModel(load_traced(file, signature_from(manifest)), manifest)
            let_files_take_batches()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at each call that TorchScript is deprecated
                return LoadedModel(torch.jit.load(file.for_torch(), map_location=target), manifest)
        except ExportError:
            raise
        except RuntimeError as error:
            message = str(error).strip().splitlines()[0]
            if "PytorchStreamReader" in message:
                raise file.damaged(f"torch does not find its records: {message}") from error
            torch_version = manifest.get("torch_version")
            raise ExportError(
                f"torch {torch.__version__} cannot load {file.path}, although all its records are right: {message}",
                reason="cannot_load",
                what_to_do=f"load it with torch {torch_version}, which wrote it, or export the model again.",
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise file.damaged(f"its manifest is not one that recfx writes ({error!r})") from error


def manifest_of_file(path: Path, *, whole: bool = True) -> dict[str, Any]:
    """The manifest of a file or of a delta; it raises as ``load`` for what it reads: all of it, if ``whole``."""
    with open_model_file(path) as file:
        return _checked_manifest(file, whole=whole)


def _place(device: torch.device | str | int | None) -> torch.device:
    try:
        place = usable_device("cpu" if device is None else device)
    except ConversionError as error:
        raise ExportError.of(error.diagnostic) from error
    if place.type == "meta":
        raise ExportError(
            "device='meta' holds no values.",
            reason="invalid_argument",
            what_to_do="pass a device that computes, such as 'cpu'.",
        )
    return place


def _check_operators(file: ModelFile, manifest: dict[str, Any], device: torch.device) -> None:
    """Refuse a file with recfx's operators if they are not here, are of other versions, or do not run there."""
    offered = OPERATOR_VERSIONS
    if manifest.get("target") != TRITON.name:
        if not library.load():
            raise ExportError(
                f"{file.path} needs recfx's C++ operators, which are missing: {library.why_not()}.",
                reason="no_library",
                what_to_do=f"export the model with portable=True, or {library.WHAT_TO_DO}",
            )
        oldest, newest = library.operators().file_operator_versions()
        offered = range(oldest, newest + 1)
    elif device.type != "cpu" and (missing := triton_target.is_here(device)) is not None:  # there, a reference runs
        raise ExportError(
            f"{file.path} needs recfx's kernels in Triton on {device}: {missing.message}",
            reason=missing.code,
            what_to_do="mend that, load the file without a device, or export the model with portable=True.",
        )
    version = manifest.get("operators_version", OPERATOR_VERSIONS[0])  # which older files lack
    if version not in offered:
        raise ExportError(
            f"{file.path} calls recfx's operators of version {version}; those here have versions {offered[0]} to "
            f"{offered[-1]}.",
            reason="other_operators",
            what_to_do=f"load it with recfx {manifest.get('recfx_version')}, which wrote it, or export the model again "
            "with portable=True.",
        )


def _checked_manifest(file: ModelFile, *, whole: bool = True) -> dict[str, Any]:
    """Read the whole file, compare it with the checksums in it, and return its manifest. If not ``whole``, the other
    records are not read, and what is noted of them is compared alone.
    """
    text = None
    with file.archive() as archive:
        if whole and (broken := archive.testzip()) is not None:
            raise file.damaged(f"its record {broken} is damaged")
        manifests = [record for record in archive.infolist() if record.filename.endswith(MANIFEST_RECORD)]
        if len(manifests) == 1:
            text = archive.read(manifests[0]).decode()
        manifest = read_manifest(text, file.path)
        content = content_checksum(archive, without_checksum(str(text)))
        if manifest.get("content_crc32") != f"{content:08x}":
            raise file.damaged("its records are not those that its manifest was written for")
    return manifest


class LoadedModel(nn.Module):
    """An exported model. It is in eval mode, whatever is asked of it.

    Example:
        >>> model = recfx.load("model.pt")
        >>> model(batch).shape, model.training
        (torch.Size([2, 1]), False)

    Attributes:
        script: the TorchScript module, or a ``LoadedProgram``; its ``serve`` takes plain tensors by name.
        manifest: what is in the file.
        inputs: the names of the tensors that ``serve`` takes.
    """

    def __init__(self, script: nn.Module, manifest: dict[str, Any]) -> None:
        super().__init__()
        self.script: Any = script
        self.manifest = manifest
        self._signature = signature_from(manifest)
        self._returns = pattern_from(manifest["returns"])
        self.inputs = tuple(name for leaf in self._signature.leaves() for name in names_of(leaf))
        self.training = False

    def __repr__(self) -> str:
        """One line, whatever the file's module holds."""
        collections = list(self.manifest["collections"])
        counted = f"{plural(len(collections), 'collection')}: {few(collections, 3)}"
        return f"LoadedModel({self.manifest.get('format', 'torchscript')}, {counted})"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's answer; it takes the arguments of the model that was exported.

        If it returned a dataclass, this returns a dict of its fields.

        Raises:
            InputError: ``wrong_argument``, or the reason code at the end of the file's own message; ``wrong_rank``,
                ``wrong_dtype``, ``wrong_size`` or ``wrong_batch_size``, if the model fails with a tensor that is unlike
                the sample's.
        """
        leaves = self._signature.flatten(args, kwargs)
        with torch.no_grad(), input_errors(lambda: self._signature.unlike_sample(leaves)):
            return put_together(self._returns, self.script.named(*leaves))

    def serve(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name, for plain tensors by name, as a server without Python calls it.

        Example:
            >>> model = recfx.load("model.pt")
            >>> inputs = {"features.user.values": batch.values(), "features.user.lengths": batch.lengths()}
            >>> outputs = model.serve(inputs)

        Raises:
            InputError: as for ``forward``; ``unknown_input``, ``missing_input``, ``wrong_argument``: not a tensor.
        """
        check_inputs(inputs, self.inputs)
        names = [names_of(leaf)[leaf.kind != "tensor" :][:1] for leaf in self._signature.leaves()]
        leaves = [inputs[name[0]] if name else None for name in names]  # of a KJT, the lengths of its first feature
        with torch.no_grad(), input_errors(lambda: self._signature.unlike_sample(leaves)):
            outputs: dict[str, torch.Tensor] = self.script.serve(inputs)
        return outputs

    def apply(self, path: str | os.PathLike[str] | Callable[[nn.Module], None]) -> LoadedModel:
        """Become the next version: what a delta holds takes the place of what was here. Calls that have begun in other
        threads end with the version that they began with. Tables and tensors that the delta changes are copied first.

        Example:
            >>> model = recfx.load("model.pt")
            >>> model.apply("model.1.delta").manifest["number"]
            1

        Args:
            path: a file of ``recfx.export_delta``, made after the version that this is. A function is called for every
                module, as ``torch.nn.Module.apply`` does.

        Returns:
            this model.

        Raises:
            ExportError: ``not_a_delta``, ``delta_of_other_base``, ``delta_out_of_order``; as ``load``: ``no_file``,
                ``cannot_read``, ``damaged_file``, ``not_exported``, ``newer_format``, ``other_hash``. The model is as
                it was then.
        """
        if callable(path):
            return super().apply(path)
        with open_model_file(as_path(path)) as file, _APPLYING:
            delta = _checked_manifest(file)
            check_follows(delta, self.manifest, file.path)
            try:
                tensors = dict(torch.jit.load(file.for_torch()).named_buffers())
                script = next_version(self.script, delta, tensors)
            except (RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
                raise file.damaged(f"it does not fit its manifest ({error!r})") from error
            self.script = script
            self.manifest = {**self.manifest, **{name: delta[name] for name in CHANGING}}
        return self

    def train(self, mode: bool = True) -> LoadedModel:
        """Stays in eval mode: a file holds no training (``cannot_train``)."""
        if mode:
            raise ExportError(
                "an exported model cannot be trained.",
                reason="cannot_train",
                what_to_do="train the model that was exported, and export it again.",
            )
        return self
