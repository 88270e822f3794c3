"""The registry of operators besides lookups: which target serves a family of operators on a device.

The operators that check a batch, route ids, find and insert them, and initialise rows are chosen like lookups: the
first target of ``BACKENDS`` that has the family for the device wins. (``convert(backend=...)`` names a target for
lookups alone.) A target says in ``operators(family, device_type)`` what it has, wherever the device is; one without
that function has nothing. It is chosen if it is here, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from recfx.errors import ConversionError, Diagnostic
from recfx.lowering import registry


@dataclass(frozen=True)
class OperatorFamily:
    """Operators with one contract, which targets implement as modules (or objects) with functions of the same names.

    Args:
        name: stem of the files in ``recfx.kernels``.
        meaning: one sentence.
    """

    name: str
    meaning: str


BAG_OFFSETS = OperatorFamily("bag_offsets", "checks a batch's lengths and ids, and says where its bags begin")
BUCKETIZE = OperatorFamily("bucketize", "routes ids to the pieces of tables that are cut by rows")
FIND_ROWS = OperatorFamily("find_rows", "finds ids in indexes that are only read, where the ids are")
HASH_INDEX = OperatorFamily("hash_index", "finds ids in indexes, and inserts them")
ROW_INITIALIZATION = OperatorFamily("row_initialization", "writes the initial weights of new rows")

FAMILIES = (BAG_OFFSETS, BUCKETIZE, FIND_ROWS, HASH_INDEX, ROW_INITIALIZATION)


@dataclass(frozen=True)
class ChosenOperators:
    """The target that serves a family.

    Args:
        backend: its name.
        operators: a module, or an object, with the family's functions.
        declined: the targets before it that have the family, and why they were not chosen.
    """

    backend: str
    operators: Any
    declined: tuple[Diagnostic, ...]


def select_operators(family: OperatorFamily, device: torch.device) -> ChosenOperators:
    """Choose the target that serves ``family`` for tensors on ``device``.

    Args:
        family: one of ``FAMILIES``.
        device: where the operators' tensors are.

    Raises:
        ConversionError: ``backend_unusable``: no target has the family on that device.
    """
    declined: list[Diagnostic] = []
    for candidate, offered in _offers(family, device.type):
        found = offered if isinstance(offered, Diagnostic) else candidate.is_here(device) or offered
        if not isinstance(found, Diagnostic):
            return ChosenOperators(candidate.name, found, tuple(declined))
        declined.append(found)
    raise ConversionError(
        f"no target has {family.name} ({family.meaning}) on {device}: " + " ".join(each.message for each in declined),
        reason="backend_unusable",
        what_to_do="use the device that the tables were converted for.",
    )


def planned_operators(family: OperatorFamily, device_type: str) -> str:
    """The target that ``select_operators`` would choose where everything that targets need is installed.

    Args:
        family: one of ``FAMILIES``.
        device_type: where the operators' tensors would be.

    Returns:
        The name of the target; ``""`` if none has the family on that device.
    """
    offers = _offers(family, device_type)
    return next((candidate.name for candidate, found in offers if not isinstance(found, Diagnostic)), "")


def _offers(family: OperatorFamily, device_type: str) -> Iterator[tuple[registry.Backend, Any]]:
    """The targets that have the family, in order, each with its operators, or with why it has none on that device."""
    for candidate in registry.BACKENDS:
        offer = getattr(importlib.import_module(candidate.module), "operators", None)
        found = None if offer is None else offer(family.name, device_type)
        if found is not None:
            yield candidate, found


class OperatorsByDevice:
    """The operators of one family that a node uses, chosen once per type of device.

    Args:
        family: one of ``FAMILIES``.
    """

    def __init__(self, family: OperatorFamily) -> None:
        self._family = family
        self._chosen: dict[str, ChosenOperators] = {}

    def on(self, device: torch.device) -> Any:
        """The operators for tensors on ``device``."""
        return self.chosen(device).operators

    def chosen(self, device: torch.device) -> ChosenOperators:
        """The target that serves tensors on ``device``, and the targets that declined."""
        chosen = self._chosen.get(device.type)
        if chosen is None:
            chosen = self._chosen[device.type] = select_operators(self._family, device)
        return chosen

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chosen": {}}  # modules cannot be pickled; they are chosen again
