"""What an export makes before it is written: a program in one of the formats, which is filled, saved and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recfx.exporter.model_call import ModelCall
from recfx.exporter.script_artifact import ScriptArtifact, script_artifacts
from recfx.exporter.serving.targets import ATEN, NATIVE, SCRIPT, TRACED, TRITON, ServingTarget
from recfx.exporter.traced_artifact import TracedArtifact, traced_artifacts

Artifact = ScriptArtifact | TracedArtifact
"""A program whose big buffers are not filled."""


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
