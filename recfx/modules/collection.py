"""``HashEmbeddingBagCollection``: a standard collection's drop-in, whose forward is a graph of explicit nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from torch import fx, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recfx.errors import ConversionError
from recfx.hashing import HashConfig, HashIndex
from recfx.hashing.row_move import RowMove
from recfx.ir.meta import NodeMeta, SourceLocation, annotate
from recfx.ir.tables import TableSpec
from recfx.modules.fit_state import fit_state, moved_weight
from recfx.modules.subclasses import new_instance
from recfx.modules.table_holder import all_held, hold
from recfx.modules.table_specs import allocate_bags, check_bag, check_config, describe_tables, physical_configs
from recfx.nodes import TableStore
from recfx.nodes.base import opaque
from recfx.nodes.fx_leaf import FxLeaf, tracer_of_call
from recfx.nodes.resources import Resources
from recfx.nodes.training_checks import refuse_fused_replicas
from recfx.nodes.unexpanded import UnexpandedCollection
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import attach_unfused, fused_optimizers, hooks_on_step, positions_with_hooks
from recfx.optim.keyed_optimizer import FusedKeyedOptimizer
from recfx.passes import PassRecord, passes, run_passes
from recfx.passes._nodes import node_name


@dataclass
class HashEmbeddingBagConfig(EmbeddingBagConfig):
    """A table of raw 64-bit ids: TorchRec's config and how its ids become rows.

    Args:
        hashing: see :class:`HashConfig`; by default every row is given out by the index.
    """

    hashing: HashConfig = field(default_factory=HashConfig)

    def __post_init__(self) -> None:
        check_config(self)  # before TorchRec divides by the rows
        super().__post_init__()


class HashEmbeddingBagCollection(FxLeaf, EmbeddingBagCollectionInterface):
    """Pooled embeddings of raw or dense ids; input and output as ``torchrec.EmbeddingBagCollection``.

    Owns ``graph_module``, a ``torch.fx.GraphModule`` of explicit nodes. Parameters are
    ``embedding_bags.<table>.weight``, as in the standard collection; index state is ``hash_indexes.<table>.*``.

    Args:
        tables: configs; plain ``EmbeddingBagConfig`` are hashed with ``HashConfig()``.
        is_weighted: whether batches carry per-id weights (SUM tables only).
        device: of the tables; ``"meta"`` allocates nothing.
        backend: kernel target of the lookups.

    Raises:
        ConversionError: a table or setting is not supported.
        ValueError: two tables have one name.
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
        """Around tables that exist already; used by the conversion.

        Args:
            configs: the standard collection's configs.
            specs: one description a table.
            bags: one ``nn.EmbeddingBag`` a table; their parameters stay the same objects.
            is_weighted: whether batches carry per-id weights.
            device: what the standard collection's ``device`` says.
            collection: fully qualified name in the model.
            backend: kernel target of the lookups.
            source: where the user's code calls or makes the collection.
            standard: class of the collection that is replaced; the methods of a subclass stay.
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
        self.embedding_bags = bags
        hold(bags)
        self._row_moves: dict[str, RowMove] = {}  # of the last load, for the optimizer's state
        self.hash_indexes = nn.ModuleDict()
        for table in specs:
            if table.hashing is not None and table.has_index:
                meta = "meta" if bags[table.name].weight.is_meta else "cpu"
                index = HashIndex(table.num_embeddings, config=table.hashing, name=table.name, device=meta)
                self.hash_indexes[table.name] = index
        init_fns = {config.name: config.init_fn for config in configs}
        self._store = TableStore(self.embedding_bags, self.hash_indexes, {}, init_fns)
        self._aside: dict[str, tuple[weakref.ref[nn.Parameter], FusedOptimizer]] = {}
        self._find_optimizers()
        self._compile()

    def _find_optimizers(self) -> None:
        """Take over the optimizers in backward that hang on the tables; those of copies and pickles are kept."""
        self._set_aside()
        for table, optimizer in self._store.optimizers.items():
            if hooks_on_step(self._store.weight(table)):  # goes on with what the fused one has in its state
                attach_unfused(self._store.weight(table), optimizer)
        optimizers, self.not_fused = fused_optimizers(self.embedding_bags, self.collection)
        self._store.optimizers.update(optimizers)
        for table in self.not_fused:  # a second optimizer beside one that was fused, say
            self._store.optimizers.pop(table, None)
        self._store.own_weights()
        self._attached = self._attached_to_weights()

    def _set_aside(self) -> None:
        """An optimizer in backward belongs to a parameter: what stands in for that, or replaced it, has none."""
        for table, (owner, optimizer) in list(self._aside.items()):
            if owner() is self._store.weight(table) or owner() is None:
                del self._aside[table]
            if owner() is self._store.weight(table):
                self._store.optimizers.setdefault(table, optimizer)
        for table in list(self._store.optimizers):
            before = self._store.owner(table)
            if before is not None and before() is not self._store.weight(table):
                self._aside[table] = before, self._store.optimizers.pop(table)

    def _attached_to_weights(self) -> list[int]:
        """Which optimizers in backward hang on the tables, by ``id``, and on which there are gradient hooks."""
        try:
            weights: list[Any] = [bag._parameters["weight"] for bag in self.embedding_bags._modules.values()]
        except KeyError:  # pruned, say: which one, and what to do
            weights = [self._store.weight(table) for table in self.embedding_bags]
        attached = [weight.__dict__.get("_in_backward_optimizers", ()) for weight in weights]
        found = [id(optimizer) for optimizers in attached for optimizer in optimizers]
        if found or self._store.optimizers or self._aside:
            found += map(id, weights)
            found += [-1 - position for position in positions_with_hooks(weights)]
        return found

    def _compile(self) -> None:
        """Make the graph from the tables: derived, so copies and pickles make it again."""
        graph_module = self.unexpanded_graph()
        self.pass_records: list[PassRecord] = run_passes(graph_module, passes(self.backend))
        self.graph_module = graph_module

    def unexpanded_graph(self, resources: Resources | None = None) -> fx.GraphModule:
        """The graph before the first pass: input, the collection as one leaf, output.

        Args:
            resources: what the nodes will work on, by default the collection's own tables.
        """
        resources = resources or Resources(self._store)
        leaf = UnexpandedCollection(self.collection, self.tables, self._is_weighted, resources, self.source)
        graph = fx.Graph()
        features = graph.create_node("placeholder", "features", type_expr=KeyedJaggedTensor, name="features")
        node = graph.create_node(
            "call_module", "collection", (features,), {}, name=node_name(self.collection, "collection")
        )
        annotate(
            node,
            NodeMeta(
                "collection", self.collection, "discovery", source=self.source,
                tables=tuple(table.name for table in self.tables),
            ),
        )  # fmt: skip
        graph.output(node)
        return fx.GraphModule({"collection": leaf}, graph)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """``features``: a KJT (or TensorDict) with at least the collection's keys, in any order.

        Returns:
            ``[B, D]`` keyed tensor, keys in the order of the tables and their features.
        """
        if torch.compiler.is_dynamo_compiling():  # one break a collection, not one a node
            return opaque(self._run, features)
        tracer = tracer_of_call(self, (features,), {})
        if tracer is not None:  # the collection is the root of the trace, or the user's code calls `forward` itself
            traced: Any = self.leaf_call(tracer, (features,), {})
            return traced
        return self._run(features)

    def path_of_root(self) -> str:
        """Where a graph of which this collection is the root finds it."""
        return "embedding_bag_collection"

    @property
    def embedding_bag_collection(self) -> HashEmbeddingBagCollection:
        """This collection itself: what the graph of ``torch.fx.symbolic_trace(collection)`` calls."""
        return self

    def _run(self, features: KeyedJaggedTensor) -> KeyedTensor:
        if not all_held(self.embedding_bags):
            self._hold_bags()
        self._follow_optimizers()
        if self._row_moves and self.training:
            self._row_moves = {}
        if self._store.optimizers and self.training and torch.is_grad_enabled():
            refuse_fused_replicas(self.collection, list(self._store.optimizers))
        pooled: KeyedTensor = self.graph_module(features)
        return pooled

    def _hold_bags(self) -> None:
        """Bags that were put in place of others have to be plain ones too."""
        for config in self._embedding_bag_configs:
            check_bag(config, self.embedding_bags[config.name], self._is_weighted, self.collection)
        hold(self.embedding_bags)

    def _follow_optimizers(self) -> None:
        """Take over what was attached to the weights since: optimizers in backward, gradient hooks."""
        attached = self._attached_to_weights()
        if attached != self._attached:
            self._find_optimizers()
            self._compile()
            self.graph_module.train(self.training)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs, in order; ``num_embeddings`` are physical rows."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether batches carry per-id weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device | str:
        """What the collection was built for, as the standard collection says it."""
        return self._device

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """State and settings of the fused optimizers, under TorchRec's names (``<table>.momentum1``)."""
        parameters, state, groups, starts = {}, {}, [], {}
        for name, optimizer in self.fused_optimizers().items():
            weight, key = self._store.weight(name), weight_name("", name)
            optimizer.prepare(weight)
            parameters[key], starts[key] = weight, optimizer.start
            state[weight] = {f"{name}.{momentum}": tensor for momentum, tensor in optimizer.named_state().items()}
            optimizer.group.setdefault("params", [weight])  # copies have none: it would be the original's
            groups.append(optimizer.group)
        moves = {weight_name("", table): move for table, move in self._row_moves.items()}
        return FusedKeyedOptimizer(parameters, state, groups, moves, starts)

    def weight(self, table: str) -> nn.Parameter:
        """The ``[rows, dim]`` parameter of a table."""
        return self._store.weight(table)

    def index(self, table: str) -> HashIndex:
        """The index of a table that has one."""
        return self._store.index(table)

    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        """The optimizer of every table that is updated in the lookup's backward, by table name."""
        self._follow_optimizers()
        return self._store.optimizers

    def own_names(self) -> frozenset[str]:
        """Attributes that belong to this class, as against those that users hang on a collection."""
        return frozenset(_OWN_NAMES)

    def reset_parameters(self) -> None:
        """Fill every table by its ``init_fn`` and forget all ids; does nothing on meta."""
        for config in self._embedding_bag_configs:
            weight = self._store.weight(config.name)
            if weight.is_meta:
                continue
            if config.init_fn is not None:
                config.init_fn(weight)
            if config.name in self.hash_indexes:
                self._store.index(config.name).reset()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HashEmbeddingBagCollection:
        super()._apply(fn, recurse)
        self._store.own_weights()  # they may be other objects now
        weights = [self._store.weight(table.name) for table in self.tables]
        if weights:
            self._device = weights[0].device
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Fewer rows than these fit: ids move to their bucket's rows, and their weights with them.

        Raises:
            CheckpointError: an index is damaged or another's. Nothing of this collection has changed then.
        """
        hooks: dict[int, Callable[..., Any]] = self.__dict__["_load_state_dict_pre_hooks"]
        for hook in hooks.values():  # before the keys are read: they may rename them
            hook(state_dict, prefix, *args)
        fitted, moves = fit_state(self, state_dict, prefix)
        for table, move in moves.items():
            key = prefix + weight_name("", table)
            saved = state_dict.get(key)
            if isinstance(saved, torch.Tensor):
                fitted[key] = moved_weight(saved, self.weight(table), move, prefix + table)
        state_dict.update(fitted)
        for table in self.hash_indexes:
            self.index(table).expect_load()
        self.__dict__["_load_state_dict_pre_hooks"] = {}  # they have run
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)
        finally:
            self.__dict__["_load_state_dict_pre_hooks"] = hooks
        self._row_moves = moves

    def check_state(self, saved: Mapping[str, Any], prefix: str) -> None:
        """Whether this collection could load its part of a state; changes nothing.

        Args:
            saved: a state, also of a bigger model.
            prefix: of this collection's keys in it.

        Raises:
            CheckpointError: what is wrong with an index.
        """
        fit_state(self, saved, prefix)

    def __reduce_ex__(self, protocol: Any) -> Any:
        standard = getattr(type(self), "_standard", None)
        if standard is None:
            return super().__reduce_ex__(protocol)
        return new_instance, (HashEmbeddingBagCollection, standard), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        modules = {name: module for name, module in self._modules.items() if name != "graph_module"}
        return {**self.__dict__, "_modules": modules, "pass_records": [], "_aside": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Trained weights may have become others than the store's in a copy that replaces modules.
        self._store.bags, self._store.indexes = self.embedding_bags, self.hash_indexes
        self._store.own_weights()
        self._attached = self._attached_to_weights()
        self._compile()
        self.graph_module.train(self.training)


# Graphs of `torch.fx.symbolic_trace` name these types; as strings they could not be pickled.
HashEmbeddingBagCollection.forward.__annotations__ = get_type_hints(HashEmbeddingBagCollection.forward)


def converted_collections(model: nn.Module) -> dict[str, HashEmbeddingBagCollection]:
    """The converted collections of ``model``, by fully qualified name."""
    return {path: module for path, module in model.named_modules() if isinstance(module, HashEmbeddingBagCollection)}


def weight_name(collection: str, table: str) -> str:
    """Fully qualified name of a table's parameter, in the standard and the converted model alike."""
    return f"{collection + '.' if collection else ''}embedding_bags.{table}.weight"


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
    "_attached",
    "_aside",
    "_row_moves",
    "requested",
    "calls",
    "pass_records",
    "graph_module",
)
