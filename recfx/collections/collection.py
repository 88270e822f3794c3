"""The unsharded converted collection: a drop-in for the standard one, whose forward is a graph of explicit nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar
from weakref import WeakMethod

import torch
from torch import fx, nn
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.compile_graph import Rewritings, compile_graph, graphs_of_modes
from recfx.collections.converted_collection import ConvertedCollection, collections_of, new_instance
from recfx.collections.kinds import check_config, describe_tables, kind_of, physical_configs
from recfx.collections.optimizer import FusedKeyedOptimizer
from recfx.collections.table_holder import all_held, hold
from recfx.errors import ConversionError, Diagnostic
from recfx.hashing import HashConfig, HashIndex
from recfx.ir.meta import SourceLocation
from recfx.ir.shards import unsharded
from recfx.ir.tables import TableSpec
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import attach_unfused, fused_optimizers, hooks_on_step
from recfx.passes import Pass
from recfx.passes.base import PASSES_KEY
from recfx.runtime.base import NodeModule, why_opaque
from recfx.runtime.in_flight import BATCHES_IN_FLIGHT, refuse_fused_replicas
from recfx.runtime.lowered import Runtime
from recfx.runtime.table_store import TableStore


class UnshardedCollection(ConvertedCollection):
    """A converted collection whose tables a rank has as a whole; base of the class of each kind. Its ``graph_module``,
    which may be another one in eval mode, is made again when another optimizer is attached, or a table has changed its
    dtype, device or layout. If the nodes are part of a ``WholeGraph``, each lookup chooses its kernel anew.
    """

    is_sharded = False

    _device: torch.device | str
    _replacement: ClassVar[type[UnshardedCollection]]  # of the classes that stand for subclasses of the user's

    def _build(self, configs: list[Any], is_weighted: bool, device: torch.device | str | None, backend: str) -> None:
        kind = kind_of(self)
        if not configs:
            raise ConversionError(
                "there are no tables.",
                reason="no_tables",
                what_to_do=f"pass at least one recfx.Hash{kind.config.__name__}.",
            )
        for config in configs:
            check_config(config, kind)
        configs = [replace(config, feature_names=config.feature_names or [config.name]) for config in configs]
        self.requested, self.calls = {config.name: getattr(config, "hashing", HashConfig()) for config in configs}, 1
        tables = nn.ModuleDict()
        for config in configs:
            if config.name in tables:
                raise ValueError(f"Duplicate table name {config.name}")
            hashing = self.requested[config.name] or HashConfig()
            tables[config.name] = kind.new_table(config, hashing.rows or config.num_embeddings, device)
        specs = describe_tables(kind, configs, tables, self.requested, is_weighted, adopt=False)
        self._device = next(tables.parameters()).device
        self.collection, self.backend, self.source = "", backend, None
        self._assemble(configs, specs, tables, is_weighted)
        self.reset_parameters()

    @classmethod
    def from_tables(
        cls, of: Any, specs: tuple[TableSpec, ...], bags: nn.ModuleDict, device: torch.device | str, collection: str, *,
        standard: type[nn.Module] | None = None, backend: str = "auto", source: SourceLocation | None = None,
        requested: Mapping[str, HashConfig | None] = MappingProxyType({}), calls: int = 1,
        passes: tuple[Pass, ...] | None = None,
    ) -> UnshardedCollection:  # fmt: skip
        """A collection in the place of another one, around the ``bags`` of tables, whose parameters stay the same
        objects. A subclass ``standard`` keeps its methods.
        """
        self, kind = new_instance(cls, standard or cls._kind.standard), cls._kind
        nn.Module.__init__(self)
        self.requested, self.calls, self.passes = dict(requested), calls, passes
        self._device, self.collection, self.backend, self.source = device, collection, backend, source
        self.__dict__.update(kind.settings_of(of))
        self._assemble(kind.configs_of(of), specs, bags, kind.is_weighted(of))
        for table in specs:
            if table.custom_init_fn and table.has_index and not self.weight(table.name).is_meta:
                self.index(table.name).mark_used()  # the rows may be trained
        return self

    def _assemble(
        self, configs: list[Any], specs: tuple[TableSpec, ...], bags: nn.ModuleDict, is_weighted: bool
    ) -> None:
        kind = kind_of(self)
        setattr(self, kind.configs_attribute, physical_configs(configs, specs))
        self._is_weighted, self.tables, self.graph_is_inlined = is_weighted, specs, False
        setattr(self, kind.tables, bags)
        hold(bags)
        self._row_moves, self.sharding = {}, unsharded(specs)
        self.hash_indexes = nn.ModuleDict()
        for table in specs:
            if table.hashing is not None and table.has_index:
                meta = "meta" if bags[table.name].weight.is_meta else "cpu"
                index = HashIndex(table.num_embeddings, config=table.hashing, name=table.name, device=meta)
                self.hash_indexes[table.name] = index
        init_fns = {config.name: config.init_fn for config in configs}
        self._store = TableStore(bags, self.hash_indexes, {}, init_fns)
        # One step of the model calls the collection ``calls`` times.
        self._store.in_flight.depth = (1 + BATCHES_IN_FLIGHT) * max(self.calls, 1) - 1
        self.not_fused = self._take_over()
        self._compared = self._store.look()
        self._compile()

    def _compile(self, made: Rewritings = Rewritings()) -> None:  # noqa: B008  it is frozen
        """Make the graph from the tables. It is derived, so copies and pickles make it again; copies from what passes
        have ``made`` for the original, if their tables are like its own.
        """
        self._store.begin, self._store.graphs = WeakMethod(self.begin_forward), self._store.graphs + 1
        self._runtime = Runtime(self._store)
        graph = self.unexpanded_graph()
        compiled = compile_graph(graph, self._runtime, self.backend, self.passes, made.training)
        graph_module, eval_graph, records, self._rewritings = graphs_of_modes(compiled, self._runtime, made)
        self.pass_records = [*compiled.meta[PASSES_KEY], *records]
        graph_module.train(self.training)  # before other threads see it: in training mode, it would insert ids
        self.graph_module, self._graph_trains = graph_module, True
        # Registered as well, so that modes and copies reach its modules; None if the modes have one graph.
        self.other_graph = None if eval_graph is graph_module else eval_graph
        self._take_graph_of_mode()

    def train(self, mode: bool = True) -> UnshardedCollection:
        """Set the mode; ``graph_module`` is that mode's graph from then on."""
        super().train(mode)
        self._take_graph_of_mode()
        return self

    def _take_graph_of_mode(self) -> None:
        if self.other_graph is not None and self._graph_trains != self.training:
            self.graph_module, self.other_graph = self.other_graph, self.graph_module
            self._graph_trains = self.training

    def graph_of(self, training: bool) -> fx.GraphModule:
        return self.graph_module if self.other_graph is None or training == self._graph_trains else self.other_graph

    def _run(self, features: KeyedJaggedTensor) -> Any:
        self.begin_forward()
        self._store.graph_fits = not self.graph_is_inlined
        try:
            return self.graph_module(features)
        finally:
            self._store.graph_fits = False

    def not_in_graph(self, trains: bool) -> str:
        if "_run" in self.__dict__:
            return f"recfx: collection {self.collection!r} cannot be part of one graph: a file answers for it."
        self.begin_forward()
        nodes = [module for module in self.graph_of(self.training).children() if isinstance(module, NodeModule)]
        return next(filter(None, (why_opaque(node, trains) for node in nodes)), "")

    def answer_with(self, lookup: nn.Module) -> None:
        """Let ``lookup`` answer from now on, in the place of the collection's own graph; hooks stay."""
        self.__dict__["_run"] = lookup  # an attribute and no child, like the method

    def begin_forward(self) -> None:
        """Do what comes before the graph runs, which may be another graph afterwards."""
        self._take_graph_of_mode()  # someone may have set `training` itself
        if not all_held(self._store.bags):  # which lookups read
            self._hold_bags(self._store.bags)
        self.follow_optimizers()
        if self._row_moves:
            self._forget_row_moves()
        if self._store.optimizers and self.training and torch.is_grad_enabled():
            refuse_fused_replicas(self.collection, list(self._store.optimizers))

    def _hold_bags(self, bags: nn.ModuleDict) -> None:
        """Check bags that the user has put in place of others, one or all: they have to be plain, too."""
        kind = kind_of(self)
        for config in kind.configs_of(self):
            bag: Any = bags._modules.get(config.name)
            kind.check_table(config, bag, self._is_weighted, self.collection)
        hold(bags)

    def __setattr__(self, name: str, value: Any) -> None:
        # All tables at once, by the user; where modules are copied, they have their attributes without it.
        if "_store" in self.__dict__ and name == kind_of(self).tables and isinstance(value, nn.ModuleDict):
            self._hold_bags(value)
            self._store.bags = value
        super().__setattr__(name, value)

    def follow_optimizers(self) -> None:
        """Make the graph again if an optimizer, a hook or a table is no longer what it was made for."""
        if self._graph_is_current():
            return
        with self._store.new_rows_lock:  # threads that serve one model come here together
            if self._graph_is_current():
                return
            not_fused = self._take_over()
            followed = self._store.look()
            self._compile()
            # Last, so that the next forward tries again if this fails: because of a pass of the user's, say.
            self.not_fused, self._compared = not_fused, followed

    def _graph_is_current(self) -> bool:
        attached, tables = self._store.look()
        # The graph of a whole model names the modules of this one, whose lookups follow their tables by themselves.
        return attached == self._compared[0] and (self.graph_is_inlined or tables == self._compared[1])

    def _take_over(self) -> dict[str, Diagnostic]:
        """Take over the optimizers in backward that are attached; copies and pickles keep theirs. Returns those that no
        kernel can carry out, and why not, by table name.
        """
        store, kind = self._store, kind_of(self)
        # Set aside optimizers whose parameter was replaced by another one, and bring them back when it returns.
        for table, (owner, optimizer) in list(store.aside.items()):
            if owner() is store.weight(table) or owner() is None:
                del store.aside[table]
            if owner() is store.weight(table):
                store.optimizers.setdefault(table, optimizer)
        for table in list(store.optimizers):
            before = store.owner(table)
            if before is not None and before() is not store.weight(table):
                store.aside[table] = before, store.optimizers.pop(table)
        for table, optimizer in store.optimizers.items():
            weight = store.weight(table)
            if hooks_on_step(weight) or len(attached_optimizers(weight)) > 1:  # it goes on with the fused one's state
                attach_unfused(weight, optimizer)
        optimizers, not_fused = fused_optimizers(store.bags, self.collection, kind.tables)
        store.optimizers.update(optimizers)
        for table in not_fused:  # such as a second optimizer beside one that was fused
            store.optimizers.pop(table, None)
        store.own_weights()
        return not_fused

    @property
    def device(self) -> torch.device | str:
        return self._device

    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        self.follow_optimizers()
        return self._store.optimizers

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """State and settings of the fused optimizers, under TorchRec's names (``<table>.momentum1``).

        Example:
            >>> from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
            >>> model = recfx.convert(Model())
            >>> apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1})
            >>> list(model.ebc.fused_optimizer.state_dict()["state"])
            ['embedding_bags.users.weight']
        """
        return FusedKeyedOptimizer(self)

    def own_names(self) -> frozenset[str]:
        kind = kind_of(self)
        return frozenset((kind.tables, kind.configs_attribute, *kind.settings_of(self), *OWN_NAMES))

    def reset_parameters(self) -> None:
        """Fill every table with its ``init_fn`` and forget all ids; does nothing on meta."""
        for config in kind_of(self).configs_of(self):
            weight = self._store.weight(config.name)
            if weight.is_meta:
                continue
            if config.init_fn is not None:
                config.init_fn(weight)
            if config.name in self.hash_indexes:
                self._store.index(config.name).reset()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> UnshardedCollection:
        super()._apply(fn, recurse)
        self._store.own_weights()  # they may be different objects now
        weights = [self._store.weight(table.name) for table in self.tables]
        if weights:
            self._device = weights[0].device
        # A named backend may not serve what the tables are now: the next forward raises the error, because a model that
        # stops halfway through `to()` would be on two devices.
        with contextlib.suppress(ConversionError):
            self.follow_optimizers()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        standard = getattr(type(self), "_standard", None)
        if standard is None:
            return super().__reduce_ex__(protocol)
        return new_instance, (type(self)._replacement, standard), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        self.follow_optimizers()  # copies of a weight lose what was attached to it since the last forward
        graphs = ("graph_module", "other_graph")
        modules = {name: module for name, module in self._modules.items() if name not in graphs}
        state = {**self.__dict__, "_modules": modules, "pass_records": []}
        del state["_runtime"], state["_compared"]  # derived, like the graphs
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # In a copy that replaces modules, the trained weights may no longer be those of the store.
        self._store.bags, self._store.indexes = kind_of(self).tables_of(self), self.hash_indexes
        self._store.own_weights()
        self._compared = self._store.look()
        self._compile(self._rewritings)
        for graph_module in filter(None, (self.graph_module, self.other_graph)):
            graph_module.graph.owning_module = None  # no cycle: the tables of a copy are freed as soon as it is


def unsharded_collections(model: nn.Module) -> dict[str, UnshardedCollection]:
    """The unsharded converted collections of ``model``, by fully qualified name."""
    return collections_of(model, UnshardedCollection)


OWN_NAMES = (
    "_compared", "_device", "_graph_trains", "_is_weighted", "_rewritings", "_row_moves", "_runtime", "_store",
    "backend", "calls", "collection", "graph_is_inlined", "graph_module", "hash_indexes", "not_fused", "other_graph",
    "pass_records", "passes", "requested", "sharding", "source", "tables",
)  # fmt: skip
"""The attributes of an instance, besides those that its kind names."""
