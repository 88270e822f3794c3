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


@dataclass(frozen=True)
class ModelCall:
    """A converted model, one call of it, and what its program takes and returns.

    Args:
        model: without wrappers; copies of it run in eval mode.
        served: the exported graph that takes the place of each collection, by ``id``.
        sample: the call.
        signature: its arguments; their leaves, one after the other, are those of the program.
        returns: what it returns.
        failures: collects why ways to a program were given up.
    """

    model: nn.Module
    served: Mapping[int, nn.Module]
    sample: Sample
    signature: Signature
    returns: Pattern
    failures: list[Diagnostic] = field(default_factory=list)

    def leaves(self, sample: Sample) -> list[Any]:
        """The program's arguments for a call."""
        return self.signature.flatten(sample.args, sample.kwargs)
