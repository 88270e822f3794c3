"""``recfx.load``: an exported file, called as the model was."""

from __future__ import annotations

import lzma
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401  registers the operators that files use
import torch
from torch import nn

from recfx.errors import ExportError, InputError
from recfx.exporter.archive import content_checksum
from recfx.exporter.loaded_program import load_traced
from recfx.exporter.manifest import read_manifest, returns_from, signature_from, without_checksum
from recfx.exporter.returns import put_together
from recfx.exporter.target import as_path
from recfx.exporter.write_file import MANIFEST_RECORD
from recfx.kernels import library
from recfx.serving import ATEN

_TOLD = re.compile(r"(builtins\.)?(RuntimeError: )?(?P<message>.*?) *\[(?P<reason>[a-z_]+)\]")
"""The last line of an error that a file's own check raises."""


_LONGEST_MANIFEST = 2**26
"""In bytes. A file of no more than some megabytes may claim to hold gigabytes."""

_CODEC_ERRORS = (zlib.error, lzma.LZMAError)


def load(path: str | os.PathLike[str], device: torch.device | str | None = None) -> LoadedModel:
    """Load a file that ``export`` has written, check that it is whole, and return the model.

    Of a TorchScript file, nothing runs but TorchScript's own code in it: the manifest is JSON text, and nothing is
    unpickled by Python. A pt2 file is read by ``torch.export.load``, which evaluates expressions for sizes that are in
    the file; load only pt2 files whose origin is known.

    Args:
        path: the file.
        device: where its tensors go; default: the CPU. Others need a file that was exported for a device.

    Raises:
        ExportError: ``invalid_argument``, ``no_file``, ``cannot_read``, ``damaged_file``, ``not_exported``,
            ``newer_format``, ``other_hash``, ``no_library``, ``wrong_device``.
    """
    found = as_path(path)
    if not os.path.isfile(found):  # False for a name that is too long
        raise ExportError(f"{found} is not a file.", reason="no_file", what_to_do="export a model to it first.")
    text = _checked_manifest(found)
    manifest = read_manifest(text, found)
    if manifest["format_version"] > 1:
        content = content_checksum(found, MANIFEST_RECORD, without_checksum(str(text)))
        if manifest.get("content_crc32") != f"{content:08x}":
            raise _damaged(found, "its records are not those that its manifest was written for")
    if str(device or "cpu").partition(":")[0] != "cpu" and manifest.get("target") != ATEN.name:
        raise ExportError(
            f"{found} was exported for the CPU: its operators do not run on {device}.",
            reason="wrong_device",
            what_to_do=f"export the model with device={str(device)!r}, or load it without a device.",
        )
    if not manifest.get("portable", True) and not library.load():
        raise ExportError(
            f"{found} needs recfx's C++ operators, which are missing: {library.why_not()}",
            reason="no_library",
            what_to_do="install a C++ compiler, or export the model with portable=True.",
        )
    try:
        if manifest.get("format") == "pt2":
            return LoadedModel(load_traced(found, signature_from(manifest)), manifest)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at each call that TorchScript is deprecated
            return LoadedModel(torch.jit.load(str(found), map_location=device), manifest)
    except RuntimeError as error:
        raise _damaged(found, str(error).strip().splitlines()[0]) from error


def _checked_manifest(path: Path) -> str | None:
    """Read the whole file, compare it with the checksums in it, and return the text of its manifest."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            if broken is not None:
                raise _damaged(path, f"its record {broken} is damaged")
            found = [each for each in archive.infolist() if each.filename.endswith(MANIFEST_RECORD)]
            if len(found) != 1 or found[0].file_size > _LONGEST_MANIFEST:
                return None
            return archive.read(found[0]).decode()
    except PermissionError as error:
        raise ExportError(
            f"{path} cannot be read: {error.strerror}.",
            reason="cannot_read",
            what_to_do="run as a user who may read it.",
        ) from error
    except ExportError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, struct.error, *_CODEC_ERRORS) as error:
        raise _damaged(path, f"it is cut off, or was not written by recfx.export ({error})") from error


class LoadedModel(nn.Module):
    """An exported model. It is in eval mode, whatever is asked of it.

    Args:
        script: the file's module.
        manifest: its manifest.

    Attributes:
        script: the TorchScript module, or a ``LoadedProgram``; its ``serve`` takes plain tensors by name.
        manifest: what is in the file.
    """

    def __init__(self, script: nn.Module, manifest: dict[str, Any]) -> None:
        super().__init__()
        self.script: Any = script
        self.manifest = manifest
        self._signature = signature_from(manifest)
        self._returns = returns_from(manifest)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's answer; arguments are those of the model that was exported.

        If it returned a dataclass, this returns a dict of its fields.

        Raises:
            InputError: ``wrong_argument``, or the reason code at the end of the file's own message.
        """
        leaves = self._signature.flatten(args, kwargs)
        with torch.no_grad(), _input_errors():
            return put_together(self._returns, self.script.named(*leaves))

    def serve(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name, for plain tensors by name, as a server without Python calls it.

        Raises:
            InputError: as for ``forward``; ``unknown_input``, ``missing_input``.
        """
        with torch.no_grad(), _input_errors():
            found: dict[str, torch.Tensor] = self.script.serve(inputs)
        return found

    def train(self, mode: bool = True) -> LoadedModel:
        """Stays in eval mode: a file holds no training.

        Raises:
            ExportError: ``cannot_train``, if ``mode`` is True.
        """
        if mode:
            raise ExportError(
                "an exported model cannot be trained.",
                reason="cannot_train",
                what_to_do="train the model that was exported, and export it again.",
            )
        super().train(False)
        return self


@contextmanager
def _input_errors() -> Iterator[None]:
    """Raise errors of the file's own checks as recfx's: those whose message ends with a reason code."""
    try:
        yield
    except (torch.jit.Error, RuntimeError) as error:
        told = _TOLD.fullmatch(_last_line(error))
        if told is None:
            raise
        raise InputError(
            f"{told['message']}.",
            reason=told["reason"],
            what_to_do="pass a batch as the model takes it.",
        ) from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _damaged(path: Path, why: str) -> ExportError:
    return ExportError(
        f"{path} cannot be loaded: {why}.",
        reason="damaged_file",
        what_to_do="export the model again, or copy the file again.",
    )
