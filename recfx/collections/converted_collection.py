"""What the unsharded and the sharded converted collection have in common."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from recfx.collections.compile_graph import context_now
from recfx.collections.first_use import first_use
from recfx.collections.kinds import CollectionKind, kind_of
from recfx.collections.table_state import LocalState
from recfx.errors import ConversionError, Diagnostic, few, plural
from recfx.hashing import HashConfig, HashIndex, as_integer
from recfx.hashing.row_move import RowMove
from recfx.ir.context import CollectionContext
from recfx.ir.meta import SourceLocation
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import TableSpec
from recfx.lowering.registry import TargetsHere
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.passes import Pass
from recfx.passes.base import PassRecord
from recfx.runtime.base import FxLeaf, load_hooks, opaque, why_opaque, without_load_hooks
from recfx.runtime.dist_groups import DistGroups
from recfx.runtime.lowered import Runtime
from recfx.runtime.select_features import why_not_plain
from recfx.runtime.table_store import TableStore
from recfx.versions.differences import is_fx_symbolic_tracing

_Collection = TypeVar("_Collection", bound="ConvertedCollection")


class ConvertedCollection(FxLeaf):
    """A collection whose forward is a graph of explicit nodes over its tables."""

    is_sharded: ClassVar[bool]  # whether this rank has only its own shards of the tables
    _kind: ClassVar[CollectionKind]  # ask `kind_of`, which users' attributes cannot hide

    collection: str  # fully qualified name in the model
    tables: tuple[TableSpec, ...]  # the whole tables, in order
    requested: dict[str, HashConfig | None]  # the hashing that was asked for, by table name
    calls: int  # how often one forward of the model calls the collection, as far as that is known
    backend: str  # kernel target of the lookups
    passes: tuple[Pass, ...] | None = None  # that make its graph, if the user named them; None: ``recfx.passes()``
    source: SourceLocation | None  # where the user's code calls or makes the collection
    not_fused: dict[str, Diagnostic]  # the optimizers in backward that no kernel can carry out, by table name
    hash_indexes: nn.ModuleDict  # the indexes of the tables that have one
    graph_module: fx.GraphModule  # that ``forward`` runs in the mode that the collection is in
    pass_records: list[PassRecord]  # what each pass did to the graph
    sharding: CollectionSharding  # if it is not sharded, each table is one shard on the only rank
    # A sharded collection has the process groups of ids and of pooled rows, and the group of the ranks that have its
    # shards; by table name, the kind and settings of each fused optimizer, and the dtypes of weights.
    groups: DistGroups
    process_group: dist.ProcessGroup | None = None
    fused: dict[str, FusedOptimizer]
    dtypes: dict[str, torch.dtype]

    _is_weighted: bool
    _need_indices: bool = False  # whether the output has the ids as well, if it has a row for each id
    _store: TableStore
    _runtime: Runtime
    _row_moves: dict[str, RowMove]  # of the last load, for the optimizer's state

    def __new__(cls: type[_Collection], *arguments: Any, **keywords: Any) -> _Collection:
        first_use()  # here, because pickles and copies do not call __init__
        return super().__new__(cls)

    def __repr__(self) -> str:
        """One line, however many tables, indexes and nodes there are: ``recfx.explain`` and its graph show them."""
        shown = few([f"{table.name} ({table.in_short})" for table in self.tables], 6)
        return f"{type(self).__name__}({plural(len(self.tables), 'table')}: {shown})"

    # Tables

    @property
    def store(self) -> TableStore:
        """The weights, indexes and fused optimizers of this rank's tables or shards, which the nodes share."""
        return self._store

    @property
    def batches_in_flight(self) -> int:
        """For how many later forwards a batch may wait for its backward; matters for tables that evict.

        For so many forwards the batch's ids keep their rows, even if the backward never comes (a skipped step). After
        that they may lose them to new ids, and then a backward of the batch is an error. A model that accumulates the
        losses of ``n`` forwards before one backward needs ``n - 1``. The default is 2; more if a forward of the
        model is known to call the collection several times: then it counts these as one. Set it alike on all ranks.
        Whether outputs are kept or dropped makes no difference.

        Example:
            >>> model = recfx.convert(Model())
            >>> model.ebc.batches_in_flight = 7  # losses of eight forwards are added up before a backward

        Raises:
            ConversionError: ``invalid_argument``, when it is set to anything but an integer from 0.
        """
        return self._store.in_flight.depth

    @batches_in_flight.setter
    def batches_in_flight(self, number: int) -> None:
        depth = as_integer(number)
        if depth is None or depth < 0:
            raise ConversionError(
                f"batches_in_flight is {number!r}.",
                reason="invalid_argument",
                module_path=self.collection,
                what_to_do="give the number of later forwards that a batch may wait for its backward, 0 or more.",
            )
        self._store.in_flight.depth = depth
        self._take_depth()

    def _take_depth(self) -> None:
        """Called when ``batches_in_flight`` has changed."""

    def graph_of(self, training: bool) -> fx.GraphModule:
        """The graph of one mode. Its modules have the same names below ``graph_module`` in either mode."""
        return self.graph_module

    def unexpanded_graph(self) -> OperatorGraph:
        """The graph before the first pass, as data: input, the collection as one leaf, output."""
        groups = self._runtime.groups
        context = CollectionContext(
            self.collection, self.tables, {}, is_weighted=self._is_weighted,
            sharding=self.sharding if self.is_sharded else None, ids_on_host=groups is None or groups.ids_on_host,
            source=self.source, need_indices=self._need_indices,
        )  # fmt: skip
        return OperatorGraph.of(context_now(context, self._store), TargetsHere(self.backend))

    def weight(self, name: str) -> nn.Parameter:
        """The ``[rows, dim]`` parameter of a table, or of one of this rank's shards.

        Example:
            >>> recfx.convert(Model()).ebc.weight("users").shape
            torch.Size([100, 8])

        Raises:
            KeyError: there is no such table.
        """
        if name not in self._store.bags:
            raise KeyError(f"there is no table {name!r}, only {sorted(self._store.bags)}")
        return self._store.weight(name)

    def index(self, name: str) -> HashIndex:
        """The index of a table, or of one of this rank's shards; it must have one.

        Example:
            >>> model = recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids())
            >>> len(model.ebc.index("users"))
            0
        """
        return self._store.index(name)

    def tables_with_index(self) -> list[str]:
        """The names of the whole tables that have an index.

        Example:
            >>> recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids()).ebc.tables_with_index()
            ['users']
        """
        return [table.name for table in self.tables if table.has_index]

    def is_weighted(self) -> bool:
        """Whether batches carry a weight for every id."""
        return self._is_weighted

    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        """The optimizers that step in the lookup's backward, by table name; of sharded tables, rule and settings."""
        return self.fused

    # Calls

    def path_of_root(self) -> str:
        """The name under which a graph finds the collection if the collection is the root of the trace."""
        return "whole_collection"

    @property
    def whole_collection(self: _Collection) -> _Collection:
        """This collection itself, which the graph of ``torch.fx.symbolic_trace(collection)`` calls."""
        return self

    def _enter(self, run: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``run``. A torch.fx tracer gets one leaf node; torch.compile gets the nodes, or ``compiled`` in a graph
        break if one of them cannot be part of its graph.
        """
        if torch.compiler.is_dynamo_compiling():
            if why := why_opaque(self, torch.is_grad_enabled()) or why_not_plain(*args, **kwargs):
                return opaque(why, compiled, *args, **kwargs)
            return self.graph_of(self.training)(*args, **kwargs)
        if is_fx_symbolic_tracing() and (proxy := self.leaf_call(args, kwargs, in_forward=True)) is not None:
            return proxy
        return run(*args, **kwargs)

    def not_in_graph(self, trains: bool) -> str:
        """Why torch.compile cannot have the collection in its graph now; ``""`` if it can. Called while it traces."""
        return f"recfx: collection {self.collection!r} cannot be part of one graph: its tables are sharded."

    # State

    def local_state(self, saved: Mapping[str, Any], prefix: str) -> LocalState:
        """What this rank takes of its part, below ``prefix``, of a saved state, which is checked."""
        return LocalState(kind_of(self), self._store, self.sharding, self.process_group, saved, prefix)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        """Load a state, which may have fewer rows: ids then move to their bucket's rows, and their weights with them.
        If an index is damaged or belongs to something else, nothing of this collection has changed.
        """
        for hook in load_hooks(self).values():  # before the keys are read, because they may rename them
            hook(state_dict, prefix, metadata, strict, missing_keys, *rest)
        planned, shards = self.local_state(state_dict, prefix), self.sharding.local()
        names = [shard.name for shard in shards if shard.table.has_index]
        indexes = {f"{prefix}hash_indexes.{name}.": self.index(name) for name in names}
        planned.say_what_is_lost(indexes)
        for index in indexes.values():
            index.expect_load()
        for key in planned.taken:
            del state_dict[key]
        if metadata.get("assign_to_params_buffers"):  # lest they be views of the state
            for key, value in planned.local.items():
                if isinstance(value, Tensor):
                    planned.local[key] = value.clone(memory_format=torch.contiguous_format)
        state_dict.update(planned.local)
        here = {shard.table.name for shard in shards}
        missing_keys.extend(key for key, table in planned.missing.items() if table not in here)
        with without_load_hooks(self):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, *rest)
        self.note_row_moves(planned.moves)

    def note_row_moves(self, moves: Mapping[str, RowMove], *, keep: bool = False) -> None:
        """Record where a load has put the rows of resized tables, which the state of their optimizers follows later."""
        self._row_moves = {**(self._row_moves if keep else {}), **moves}

    def _forget_row_moves(self) -> None:
        """Note that a training step begins: optimizer state loaded from now on belongs to the rows as they are."""
        if self.training:
            self._row_moves = {}

    def own_names(self) -> frozenset[str]:
        """The attributes that belong to the class, not to the user, who may have put others on the original."""
        return frozenset(self.__dict__)


def collections_of(model: nn.Module, kind: type[_Collection]) -> dict[str, _Collection]:
    """The converted collections of one class, by fully qualified name; a shared one under its first name."""
    return {path: module for path, module in model.named_modules() if isinstance(module, kind)}


def converted_collections(model: nn.Module) -> dict[str, ConvertedCollection]:
    """The converted collections of ``model``, sharded or not, by fully qualified name."""
    return collections_of(model, ConvertedCollection)


def collections_by_prefix(model: nn.Module, kind: type[_Collection]) -> list[tuple[str, _Collection]]:
    """The collections of one class with the prefix of their keys in a state; a shared one appears under every name."""
    modules = model.named_modules(remove_duplicate=False)
    return [(f"{path}." * bool(path), module) for path, module in modules if isinstance(module, kind)]


def index_of(module: nn.Module, table: str) -> HashIndex | None:
    """The index of a table; None if ``module`` is not a converted collection or the table has no index."""
    if not isinstance(module, ConvertedCollection) or table not in module.hash_indexes:
        return None
    return module.index(table)


# Classes that stand for a user's subclasses of the standard collections


@functools.cache  # one class per pair, or copies would be of a different class
def class_for(replacement: type[Any], standard: type[nn.Module]) -> type[Any]:
    """``replacement`` itself for the standard collection; for a subclass of it, a class that has its methods too.
    Public methods that the subclass overrides win over those of ``replacement``. ``forward`` is never one of them,
    because a subclass with its own forward is not converted.
    """
    of_torchrec = replacement._kind.standard
    if standard is of_torchrec:
        return replacement
    overrides: dict[str, Any] = {"_standard": standard, "_replacement": replacement}
    for base in reversed(standard.__mro__[: standard.__mro__.index(of_torchrec)]):
        for name, value in base.__dict__.items():
            if hasattr(replacement, name) and not name.startswith("_"):
                overrides[name] = value
    return type(standard.__name__, (replacement, standard), overrides)


def new_instance(replacement: Any, standard: Any) -> Any:
    """An instance without state, from which pickles and copies start: the class cannot be found by its name."""
    kind: Any = class_for(replacement, standard)
    return kind.__new__(kind)
