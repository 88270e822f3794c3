"""What an export makes before it is written: a program in one of the formats, which is filled, saved and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from recfx.errors import Diagnostic
from recfx.exporter.buffers import Filling
from recfx.exporter.model_call import ModelCall
from recfx.exporter.script_artifact import script_artifacts
from recfx.exporter.serving.targets import ATEN, NATIVE, SCRIPT, TRACED, TRITON, ServingTarget
from recfx.exporter.traced_artifact import traced_artifacts


class Artifact(Protocol):
    """A program whose big buffers are not filled."""

    @property
    def graph(self) -> str:
        """The text of its graph; "" if it has none."""
        ...

    def operators(self) -> list[str]:
        """The names of the operators that it calls, such as ``aten::add.Tensor``."""
        ...

    def buffers(self) -> dict[str, torch.Tensor]:
        """Its buffers by name."""
        ...

    def set_buffer(self, name: str, content: torch.Tensor) -> None:
        """Put another tensor in the place of a buffer."""
        ...

    def check_loading(self, fillings: list[Filling]) -> Diagnostic | None:
        """Why it could not be loaded if it were saved; None if it can."""
        ...

    def save(self, path: Path, manifest: str) -> None:
        """Save it as it is, with the text of the manifest."""
        ...

    def named(self, *leaves: Any) -> dict[str, torch.Tensor]:
        """Run it: the tensors and KJTs of the signature to output tensors by name."""
        ...


@dataclass(frozen=True)
class FileFormat:
    """A format of ``export``.

    Args:
        target: the modules of its nodes on the CPU.
        elsewhere: the modules on other devices; None if its files run on the CPU alone.
        make: makes programs that may become the file, in one way after the other.
        compiler: what makes the programs, for messages.
        reason: the reason code if it cannot make one.
        native: the modules of its nodes if the file may use recfx's operators; None if it may not.
        elsewhere_native: ``native`` on other devices.
    """

    target: ServingTarget
    elsewhere: ServingTarget | None
    make: Callable[[ModelCall], Iterator[Artifact]]
    compiler: str
    reason: str
    native: ServingTarget | None = None
    elsewhere_native: ServingTarget | None = None


FILE_FORMATS = {
    "torchscript": FileFormat(SCRIPT, ATEN, script_artifacts, "TorchScript", "not_scriptable", NATIVE, TRITON),
    "pt2": FileFormat(TRACED, None, traced_artifacts, "torch.export", "not_exportable"),
}
"""The formats, by name."""
