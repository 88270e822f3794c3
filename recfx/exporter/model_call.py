"""The model that is exported, with the call of it that its program is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from recfx.discovery.sample import Sample
from recfx.errors import Diagnostic
from recfx.exporter.arguments import Signature
from recfx.exporter.patterns import Pattern
from recfx.exporter.served_collection import ServedCollection

BIGGER, ONE, NONE, EMPTY, STRIDED, VARIED = (
    "a bigger batch", "a batch of one", "a batch of no samples", "a batch without ids",
    "tensors that are not contiguous", "other values",
)  # fmt: skip
"""The names of the other batches on which a file is compared with the model."""


@dataclass(frozen=True)
class ModelCall:
    """A converted model, the calls of it on which its file is compared, and what its program takes and returns.

    ``served`` has what takes the place of each collection, by ``id``; the leaves of ``signature``, one after the other,
    are the program's arguments; ``changed_buffer`` is a buffer that every call changes; ``failures`` collects why ways
    to a program were given up.
    """

    model: nn.Module
    served: Mapping[int, ServedCollection]
    sample: Sample
    other_calls: Mapping[str, Sample]
    outputs: Any
    signature: Signature
    returns: Pattern
    changed_buffer: str | None = None
    failures: list[Diagnostic] = field(default_factory=list)

    @property
    def graphs(self) -> dict[int, nn.Module]:
        """The exported graph of each collection, by its ``id``."""
        return {key: served.graph_module for key, served in self.served.items()}

    def leaves(self, sample: Sample) -> list[Any]:
        """The program's arguments for a call."""
        return self.signature.flatten(sample.args, sample.kwargs)
