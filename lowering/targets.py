"""The kernel targets, as passes ask them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recfx.ir.context import Served
from recfx.ir.facts import LookupFacts
from recfx.lowering.operators import FIND_ROWS, HASH_INDEX, planned_operators, select_operators
from recfx.lowering.registry import choose_backend, select_planned


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

    def may_name(self, backend: str) -> bool:
        """See ``Targets``. Lowering raises an error for one that does not serve the lookup."""
        return True

    def find_rows(self, device: str) -> Served:
        """See ``Targets``."""
        chosen = select_operators(FIND_ROWS, torch.device(device))
        return Served(chosen.backend, chosen.declined)

    def index_operators(self, device: str) -> str:
        """See ``Targets``."""
        return "" if device == "meta" else select_operators(HASH_INDEX, torch.device(device)).backend


@dataclass(frozen=True)
class PlannedTargets:
    """The kernel targets of machines that are not here, on which everything that targets need is installed.

    Args:
        backend: ``"auto"``, or the one backend that every lookup is to use. A lookup that it does not serve has none.
        chip: the name of the NPU whose limits count; None if none do.
    """

    backend: str = "auto"
    chip: str | None = None

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        """See ``Targets``."""
        return select_planned(lookup, self.backend, self.chip)

    def may_name(self, backend: str) -> bool:
        """See ``Targets``. Lowering raises an error for one that does not serve the lookup."""
        return True

    def find_rows(self, device: str) -> Served:
        """See ``Targets``."""
        return Served(planned_operators(FIND_ROWS, device))

    def index_operators(self, device: str) -> str:
        """See ``Targets``."""
        return planned_operators(HASH_INDEX, device)
