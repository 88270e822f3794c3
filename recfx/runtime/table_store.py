"""What the nodes of one collection share: its weights, its indexes, its fused optimizers and its batches in flight.

The collection registers the modules, so that every parameter and buffer has one name; nodes do not register them.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from recfx.errors import ConversionError, few
from recfx.hashing import HashIndex
from recfx.ir.context import TableFacts
from recfx.lowering.registry import WeightFacts, facts_of_table, facts_of_weights
from recfx.optim.attached import all_attached
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import hooks_on_step, positions_with_hooks
from recfx.optim.ordinary_optimizers import OrdinaryOptimizers
from recfx.runtime.in_flight import BatchesInFlight
from recfx.versions.differences import watch_tensors

_OF_PARAMETERS = ("_lock", "_owners", "_ordinary", "_noted", "aside", "begin")  # what copies do not have


class TableStore:
    """Weights, indexes and fused optimizers of one collection, by table name.

    ``init_fns`` has None for tables without a function of their own; ``device`` is the one to report if there are no
    tables, as on a rank without shards.
    """

    def __init__(
        self, bags: nn.ModuleDict, indexes: nn.ModuleDict, optimizers: dict[str, FusedOptimizer],
        init_fns: dict[str, Callable[[torch.Tensor], object] | None], device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.bags = bags
        self.indexes = indexes
        self.optimizers = optimizers
        self.init_fns = init_fns
        self.in_flight = BatchesInFlight()
        self._owners: dict[str, weakref.ref[nn.Parameter]] = {}
        self._ordinary: dict[str, OrdinaryOptimizers] = {}
        self._given: dict[str, tuple[torch.Tensor | None, int, bool]] = {}  # in a copy: what it copies of ``_ordinary``
        self._lock, self._process = threading.RLock(), os.getpid()
        self._noted: dict[bool, tuple[Callable[..., bool] | None, list[WeightFacts]]] = {}  # by inference mode
        # For every table whose weight other tables or modules have as well, the names of these.
        self.shared_weights: dict[str, list[str]] = {}
        # Fused optimizers whose parameter was replaced by another one, with that parameter.
        self.aside: dict[str, tuple[weakref.ref[nn.Parameter], FusedOptimizer]] = {}
        # Whether the forward under way has compared the tables with what its graph was made for: no weight with a fused
        # optimizer has a hook or was replaced, and the kernels of all lookups still serve their tables.
        self.graph_fits = False
        # What the collection does at the beginning of a forward, and how many graphs have been made of it.
        self.begin: Callable[[], Callable[[], None] | None] = lambda: None
        self.graphs = 0
        self._without_tables = device or torch.device("cpu")

    @property
    def new_rows_lock(self) -> Any:  # threading.RLock, which is not a type
        """A lock to hold while rows are given out and initialised, lest another thread initialise them as well."""
        if self._process != os.getpid():  # in a forked child, the thread that held it does not exist
            self._lock, self._process = threading.RLock(), os.getpid()
        return self._lock

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in _OF_PARAMETERS}
        return {**state, "_given": {table: own.since_last_step() for table, own in self._ordinary.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_given": {}, **state})
        self._owners, self._ordinary, self.aside, self.graph_fits = {}, {}, {}, False  # a copy has its own parameters
        self._noted = {}
        self._lock, self._process = threading.RLock(), os.getpid()

    def begin_forward(self, made_for: int, collection: str) -> None:
        """Do what the collection does before its graph runs, for a graph that is compiled, which must be the newest."""
        if (begin := self.begin()) is not None:
            begin()
        if made_for != self.graphs:
            raise ConversionError(
                "its tables, their hooks or optimizers in backward are no longer what its compiled graph was made for.",
                reason="outdated_graph",
                module_path=collection,
                what_to_do="call it again, and it is compiled for what they are now.",
            )

    @property
    def device(self) -> torch.device:
        # Only the first table is read: every node calls this, so reading all tables would be quadratic.
        bag = next((bag for bag in self.bags._modules.values() if bag is not None), None)
        weight = None if bag is None else bag._parameters["weight"]
        return self._without_tables if weight is None else weight.device

    def weight(self, table: str) -> nn.Parameter:
        """The table's ``[rows, dim]`` parameter.

        Raises:
            ConversionError: ``unsupported_bag``: it is no longer a parameter.
        """
        # Read from the module each time, because `to_empty` replaces the object.
        bag = self.bags._modules.get(table)
        weight = None if bag is None else bag._parameters.get("weight")
        if weight is None:
            raise ConversionError(
                f"the module of table {table!r} has no parameter `weight` any more: something replaced it "
                "(pruning or weight normalization, say).",
                reason="unsupported_bag",
                what_to_do="remove it again; to keep it, leave this collection unconverted.",
            )
        return weight

    def facts(self, table: str) -> TableFacts:
        return facts_of_table(self.weight(table), self.optimizers.get(table))

    def weights(self, tables: Sequence[str]) -> list[torch.Tensor]:
        """``weight`` of each of ``tables``. Every batch asks for all of them, in some models for thousands."""
        bags: Any = self.bags._modules
        weights = [bags[table]._parameters.get("weight") for table in tables]
        if self.graph_fits:
            return weights
        return [self.weight(table) if weight is None else weight for table, weight in zip(tables, weights, strict=True)]

    def look(self) -> tuple[list[Any], list[WeightFacts]]:
        """The optimizers in backward on the tables, with which tables have gradient hooks; and what kernels are chosen
        for. Every forward asks, in some models for thousands of tables. The value stays equal as long as nothing is
        attached or removed, and no table changes.
        """
        try:
            weights: list[Any] = [bag._parameters["weight"] for bag in self.bags._modules.values() if bag is not None]
            # Not their ids: another one may get the id of one that is gone.
            seen = all_attached(weights)
        except (KeyError, AttributeError):  # a weight is gone, by pruning or set to None: say which, and what to do
            weights = [self.weight(table) for table in self.bags]
            seen = all_attached(weights)
        if seen or self.optimizers or self.aside:
            positions = positions_with_hooks(weights, seen)
            seen += map(id, weights)
            seen += [-1 - position for position in positions]
        return seen, self._facts_of(weights)

    def _facts_of(self, weights: list[torch.Tensor]) -> list[WeightFacts]:
        mode = torch.is_inference_mode_enabled()  # in which tensors look different
        are_as_noted, facts = self._noted.get(mode, (None, []))
        if are_as_noted is None or len(facts) != len(weights) or not are_as_noted(*weights):
            # In this order, in case another thread changes a weight meanwhile.
            _, facts = self._noted[mode] = watch_tensors(weights), facts_of_weights(weights)
        return facts

    def refuse_gradient_hooks(self, tables: Sequence[str], collection: str) -> None:
        """Raise a ``ConversionError``, ``gradient_hook``, for a weight with a hook and a fused optimizer."""
        fused = [table for table in tables if table in self.optimizers]
        weights = self.weights(fused)
        for position in positions_with_hooks(weights, all_attached(weights)):
            raise ConversionError(
                f"table {fused[position]!r}: {hooks_on_step(weights[position])}, but it has a fused optimizer, which "
                "steps inside the backward, without a gradient of the weight and without step(): it would never run.",
                reason="gradient_hook",
                module_path=collection,
                what_to_do="remove the hook, or register it before the conversion (unsharded); a hook on the "
                "collection's output sees the pooled gradient.",
            )

    def own_weights(self) -> None:
        """Record that the fused optimizers belong to the current parameters."""
        self._owners = {table: weakref.ref(self.weight(table)) for table in self.optimizers}

    def replaced(self, tables: Sequence[str], weights: Sequence[torch.Tensor]) -> list[str]:
        """Find the tables whose fused optimizer belongs to another tensor than the one in ``weights``, which may be a
        stand-in for the parameter. Every batch asks for all tables, in some models for thousands.
        """
        owners = map(self._owners.get, tables)
        return [
            table
            for table, owner, weight in zip(tables, owners, weights, strict=True)
            if owner is not None and owner() is not weight and table in self.optimizers
        ]

    def owner(self, table: str) -> weakref.ref[nn.Parameter] | None:
        """The parameter that the fused optimizer of ``table`` belongs to; None if it has never been read."""
        return self._owners.get(table)

    def ordinary_optimizers(self, table: str, collection: str) -> OrdinaryOptimizers:
        """The ordinary optimizers of a table with an index, which are watched from the first call on."""
        if table not in self._ordinary:
            reference = weakref.ref(self)

            def weight() -> torch.Tensor | None:
                store = reference()
                if store is None or table in store.optimizers or (bag := store.bags._modules.get(table)) is None:
                    return None
                return bag._parameters.get("weight")

            given = self._given.pop(table, (None, 0, False))
            self._ordinary[table] = OrdinaryOptimizers(collection, table, self.index(table), weight, given)
        return self._ordinary[table]

    def indexes_of(self, tables: Sequence[str]) -> list[HashIndex]:
        """The indexes of ``tables``. Every batch asks for all of them, in some models for thousands."""
        indexes: Any = self.indexes._modules
        return [indexes[table] for table in tables]

    def index(self, table: str) -> HashIndex:
        index = self.indexes._modules.get(table)
        if not isinstance(index, HashIndex):
            if table in self.bags:
                raise KeyError(f"table {table!r} has no index: its ids are rows")
            raise KeyError(f"there is no table {table!r} here, but {few(list(self.bags), 10)}")
        return index
