"""The kernel targets, as passes ask them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts, Served
from recfx.lowering.registry import BACKENDS, Backend, choose_backend, first_backend


@dataclass(frozen=True)
class TargetsHere:
    """The kernel targets of this machine; ``backend`` is ``"auto"``, or the one that every lookup must use."""

    backend: str = "auto"

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        chosen, declined = choose_backend(lookup, self.backend, collection)
        return Served(chosen.name, declined, chosen.serves_finding(lookup))

    def may_name(self, backend: str) -> bool:
        return True

    def find_rows(self, device: str) -> Served:
        declined: list[Diagnostic] = []
        for candidate in BACKENDS:
            if device.partition(":")[0] in candidate.finds_rows_on:
                refusal = self._absent(candidate, device)
                if refusal is None:
                    return Served(candidate.name, tuple(declined))
                declined.append(refusal)
        return Served("reference", tuple(declined))

    def _absent(self, candidate: Backend, device: str) -> Diagnostic | None:
        return candidate.is_here(torch.device(device))

    def index_operators(self, device: str) -> str:
        return "" if device == "meta" else "cpu" if device == "cpu" else "reference"


@dataclass(frozen=True)
class PlannedTargets(TargetsHere):
    """The kernel targets of machines that are not here, on which everything that targets need is installed.

    Args:
        backend: ``"auto"``, or the one backend that every lookup is to use. A lookup that it does not serve has none.
        chip: the name of the NPU whose limits count; None if none do.
    """

    chip: str | None = None

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        chosen, declined = first_backend(lookup, self.backend, lambda one: one.serves(lookup, self.chip))
        if chosen is None:
            message = f"backend {self.backend!r} does not serve the lookup."
            return Served("", declined, Diagnostic("no_finding_kernel", "", message, by=self.backend))
        return Served(chosen.name, declined, chosen.serves_finding(lookup))

    def _absent(self, candidate: Backend, device: str) -> Diagnostic | None:
        return None
