"""The kernel targets, as passes ask them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recfx.ir.context import Served
from recfx.ir.lookup_facts import LookupFacts
from recfx.lowering.operators import HASH_INDEX, select_operators
from recfx.lowering.registry import choose_backend


@dataclass(frozen=True)
class TargetsHere:
    """The kernel targets of this machine.

    Args:
        backend: ``"auto"``, or the one backend that every lookup must use.
    """

    backend: str = "auto"

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        """See ``Targets``."""
        chosen, declined = choose_backend(lookup, self.backend, collection)
        return Served(chosen.name, declined, chosen.serves_finding(lookup))

    def index_operators(self, device: str) -> str:
        """See ``Targets``."""
        return "" if device == "meta" else select_operators(HASH_INDEX, torch.device(device)).backend
