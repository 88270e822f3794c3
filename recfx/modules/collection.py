"""``HashEmbeddingBagCollection``: a drop-in for the standard collection, whose forward is a graph of explicit nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from torch import fx, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recfx.errors import ConversionError
from recfx.hashing import HashConfig, HashIndex
from recfx.ir.meta import SourceLocation
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.tables import TableSpec
from recfx.lowering.targets import TargetsHere
from recfx.modules.compile_graph import compile_graph, context_of
from recfx.modules.converted_collection import collections_of
from recfx.modules.eval_graph import make_eval_graph
from recfx.modules.follow_optimizers import OptimizerFollower
from recfx.modules.subclasses import new_instance
from recfx.modules.table_holder import all_held, hold
from recfx.modules.table_specs import allocate_bags, check_bag, check_config, describe_tables, physical_configs
from recfx.modules.whole_tables import WholeTables
from recfx.nodes import TableStore
from recfx.nodes.host_copies import crosses
from recfx.nodes.in_flight import BATCHES_IN_FLIGHT
from recfx.nodes.resources import Resources
from recfx.nodes.training_checks import refuse_fused_replicas
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.passes.base import PASSES_KEY


class HashEmbeddingBagCollection(WholeTables, EmbeddingBagCollectionInterface):
    """Pooled embeddings of raw or dense ids; input and output are those of ``torchrec.EmbeddingBagCollection``.

    Owns ``graph_module``, a ``torch.fx.GraphModule`` of explicit nodes, which may be another one in eval mode. Graphs
    are made again when an optimizer is attached, and when the tables move between the host and another device (unless
    the nodes are part of a ``WholeGraph``).
    Parameters are ``embedding_bags.<table>.weight``, as in the standard collection; index state is
    ``hash_indexes.<table>.*``.

    Args:
        tables: configs; plain ``EmbeddingBagConfig`` are hashed with ``HashConfig()``.
        is_weighted: whether batches carry per-id weights (SUM tables only).
        device: device of the tables; ``"meta"`` allocates nothing.
        backend: kernel target of the lookups.

    Raises:
        ConversionError: a table or setting is not supported.
        ValueError: two tables have the same name.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if not tables:
            raise ConversionError(
                "there are no tables.", reason="no_tables", what_to_do="pass at least one HashEmbeddingBagConfig."
            )
        for config in tables:
            check_config(config)
        tables = [replace(config, feature_names=config.feature_names or [config.name]) for config in tables]
        self.requested, self.calls = {config.name: getattr(config, "hashing", HashConfig()) for config in tables}, 1
        bags = allocate_bags(tables, device)
        specs = describe_tables(tables, bags, self.requested, is_weighted, adopt=False)
        found: Any = next(iter(bags.values())).weight.device
        self._assemble(tables, specs, bags, is_weighted, found, "", backend, None)
        self.reset_parameters()

    @classmethod
    def from_tables(
        cls,
        configs: list[EmbeddingBagConfig],
        specs: tuple[TableSpec, ...],
        bags: nn.ModuleDict,
        is_weighted: bool,
        device: torch.device | str,
        collection: str,
        backend: str,
        source: SourceLocation | None,
        standard: type[EmbeddingBagCollection] = EmbeddingBagCollection,
        requested: Mapping[str, HashConfig | None] = MappingProxyType({}),
        calls: int = 1,
    ) -> HashEmbeddingBagCollection:
        """A collection around tables that already exist; used by the conversion.

        Args:
            configs: the standard collection's configs.
            specs: one description per table.
            bags: one ``nn.EmbeddingBag`` per table; their parameters stay the same objects.
            is_weighted: whether batches carry per-id weights.
            device: the standard collection's ``device``.
            collection: fully qualified name in the model.
            backend: kernel target of the lookups.
            source: where the user's code calls or makes the collection.
            standard: class of the collection that is replaced; the methods of a subclass are kept.
            requested: the hashing that was asked for, by table.
            calls: how often one forward calls the collection, as far as that is known.
        """
        self: HashEmbeddingBagCollection = new_instance(HashEmbeddingBagCollection, standard)
        nn.Module.__init__(self)
        self.requested, self.calls = dict(requested), calls
        self._assemble(configs, specs, bags, is_weighted, device, collection, backend, source)
        for table in specs:
            if table.custom_init_fn and table.has_index and not self.weight(table.name).is_meta:
                self.index(table.name).mark_used()  # the rows may be trained
        return self

    def _assemble(
        self,
        configs: list[EmbeddingBagConfig],
        specs: tuple[TableSpec, ...],
        bags: nn.ModuleDict,
        is_weighted: bool,
        device: torch.device | str,
        collection: str,
        backend: str,
        source: SourceLocation | None,
    ) -> None:
        self._embedding_bag_configs = physical_configs(configs, specs)
        self._is_weighted = is_weighted
        self._device = device
        self.collection = collection
        self.tables = specs
        self.backend = backend
        self.source = source
        self.graph_is_inlined = False
        self.embedding_bags = bags
        hold(bags)
        self._row_moves = {}
        self.hash_indexes = nn.ModuleDict()
        for table in specs:
            if table.hashing is not None and table.has_index:
                meta = "meta" if bags[table.name].weight.is_meta else "cpu"
                index = HashIndex(table.num_embeddings, config=table.hashing, name=table.name, device=meta)
                self.hash_indexes[table.name] = index
        init_fns = {config.name: config.init_fn for config in configs}
        self._store = TableStore(self.embedding_bags, self.hash_indexes, {}, init_fns)
        # A step of the model is as many forwards of the collection as it has calls.
        self._store.in_flight.depth = (1 + BATCHES_IN_FLIGHT) * max(self.calls, 1) - 1
        self._follower = OptimizerFollower(self._store, collection)
        self.not_fused, self._attached = self._follower.not_fused, self._follower.look()
        self._compile()

    def _compile(self) -> None:
        """Make the graph from the tables. It is derived, so copies and pickles make it again."""
        graph_module = compile_graph(self.unexpanded_graph(), Resources(self._store), self.backend)
        self._graph_device = self._store.device
        self.pass_records = list(graph_module.meta[PASSES_KEY])
        eval_graph, records = make_eval_graph(graph_module)
        self.pass_records += records
        self.graph_module, self._graph_trains = graph_module, True
        # Registered as well, so that modes and copies reach its modules; None if the modes have one graph.
        self.other_graph = None if eval_graph is graph_module else eval_graph
        self._take_graph_of_mode()

    def train(self, mode: bool = True) -> HashEmbeddingBagCollection:
        """Set the mode; ``graph_module`` is that mode's graph from then on."""
        super().train(mode)
        self._take_graph_of_mode()
        return self

    def _take_graph_of_mode(self) -> None:
        if self.other_graph is not None and self._graph_trains != self.training:
            self.graph_module, self.other_graph = self.other_graph, self.graph_module
            self._graph_trains = self.training

    def graph_of(self, training: bool) -> fx.GraphModule:
        """See ``ConvertedCollection``."""
        return self.graph_module if self.other_graph is None or training == self._graph_trains else self.other_graph

    def unexpanded_graph(self) -> OperatorGraph:
        """The graph before the first pass, as data: input, the collection as one leaf, output."""
        context = context_of(self.collection, self.tables, self._is_weighted, Resources(self._store), self.source)
        return OperatorGraph.of(context, TargetsHere(self.backend))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """``features``: a KJT (or TensorDict) with at least the collection's keys, in any order.

        Returns:
            ``[B, D]`` keyed tensor, keys in the order of the tables and their features.
        """
        pooled: KeyedTensor = self._enter(self._run, self._run, features)
        return pooled

    def _run(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self._store.forwards.call(self, self.calls, self._forward, features)

    def _forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        self.begin_forward()
        self._store.has_no_hooks = True  # the tables that have one are not fused any more
        try:
            pooled: KeyedTensor = self.graph_module(features)
            return pooled
        finally:
            self._store.has_no_hooks = False

    def answer_with(self, lookup: nn.Module) -> None:
        """Let ``lookup`` answer from now on, in the place of the collection's own graph; hooks stay."""
        self.__dict__["_run"] = lookup  # an attribute and no child, like the method

    def begin_forward(self) -> None:
        """Do what comes before the graph runs, which may be another graph afterwards.

        Raises:
            ConversionError: what was put on the collection since the conversion does not fit it.
        """
        self._take_graph_of_mode()  # someone may have set `training` itself
        if not all_held(self.embedding_bags):
            self._hold_bags()
        self._follow_optimizers()
        self._forget_row_moves()
        if self._store.optimizers and self.training and torch.is_grad_enabled():
            refuse_fused_replicas(self.collection, list(self._store.optimizers))

    def _hold_bags(self) -> None:
        """Check bags that the user has put in place of others: they have to be plain, too."""
        for config in self._embedding_bag_configs:
            check_bag(config, self.embedding_bags[config.name], self._is_weighted, self.collection)
        hold(self.embedding_bags)

    def _follow_optimizers(self) -> None:
        """Take over optimizers and hooks that were attached to the weights since the last look."""
        if self._follower.look() != self._attached:
            self._follower.take_over()
            self.not_fused, self._attached = self._follower.not_fused, self._follower.look()
            self._compile()
            self.graph_module.train(self.training)

    @property
    def device(self) -> torch.device | str:
        """The device that the collection was built for, as in the standard collection."""
        return self._device

    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        """The optimizer of every table that is updated in the lookup's backward, by table name."""
        self._follow_optimizers()
        return self._store.optimizers

    def own_names(self) -> frozenset[str]:
        """Attributes that belong to this class, as opposed to those that users put on a collection."""
        return frozenset(_OWN_NAMES)

    def reset_parameters(self) -> None:
        """Fill every table with its ``init_fn`` and forget all ids; does nothing on meta."""
        for config in self._embedding_bag_configs:
            weight = self._store.weight(config.name)
            if weight.is_meta:
                continue
            if config.init_fn is not None:
                config.init_fn(weight)
            if config.name in self.hash_indexes:
                self._store.index(config.name).reset()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HashEmbeddingBagCollection:
        was_on = self._store.device.type
        super()._apply(fn, recurse)
        self._store.own_weights()  # they may be different objects now
        weights = [self._store.weight(table.name) for table in self.tables]
        if weights:
            self._device = weights[0].device
        if self._store.device.type != was_on:
            self._follow_device()
        return self

    def _follow_device(self) -> None:
        """Make the graphs again, unless the tables are on the host, and were: only there, they are always the same."""
        host = torch.device("cpu")
        if self.graph_is_inlined or not (crosses(self._store.device, host) or crosses(self._graph_device, host)):
            return
        # A named backend may not serve the new device: the next forward raises the error, because a model that stops
        # halfway through `to()` would be on two devices.
        with contextlib.suppress(ConversionError):
            self._compile()
            self.graph_module.train(self.training)

    def __reduce_ex__(self, protocol: Any) -> Any:
        standard = getattr(type(self), "_standard", None)
        if standard is None:
            return super().__reduce_ex__(protocol)
        return new_instance, (HashEmbeddingBagCollection, standard), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        graphs = ("graph_module", "other_graph")
        modules = {name: module for name, module in self._modules.items() if name not in graphs}
        return {**self.__dict__, "_modules": modules, "pass_records": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # In a copy that replaces modules, the trained weights may no longer be those of the store.
        self._store.bags, self._store.indexes = self.embedding_bags, self.hash_indexes
        self._store.own_weights()
        self._attached = self._follower.look()
        self._compile()
        self.graph_module.train(self.training)


# Graphs of `torch.fx.symbolic_trace` name these types; as strings they could not be pickled.
HashEmbeddingBagCollection.forward.__annotations__ = get_type_hints(HashEmbeddingBagCollection.forward)


def unsharded_collections(model: nn.Module) -> dict[str, HashEmbeddingBagCollection]:
    """The unsharded converted collections of ``model``, by fully qualified name."""
    return collections_of(model, HashEmbeddingBagCollection)


_OWN_NAMES = (
    "_embedding_bag_configs",
    "_is_weighted",
    "_device",
    "collection",
    "tables",
    "backend",
    "source",
    "embedding_bags",
    "hash_indexes",
    "not_fused",
    "_store",
    "_follower",
    "_attached",
    "_row_moves",
    "requested",
    "calls",
    "graph_is_inlined",
    "_graph_device",
    "pass_records",
    "graph_module",
    "other_graph",
    "_graph_trains",
)
