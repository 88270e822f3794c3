"""From a collection to its graph: context, rewrites, lowering."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from recfx.errors import ConversionError, RecfxError
from recfx.ir.context import CollectionContext, TableFacts
from recfx.ir.meta import Frozen
from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.ir.verifier import GraphVerificationError
from recfx.passes import passes
from recfx.passes.base import PASSES_KEY, Pass, PassRecord, Rewrite, Rewriting, run_passes
from recfx.passes.find_on_device import find_on_device
from recfx.runtime.lower_graph import lower_graph, module_of
from recfx.runtime.lowered import Runtime
from recfx.runtime.table_store import TableStore


@dataclass(frozen=True)
class Rewritings(Frozen):
    """What passes have made of the graph of a collection, for either mode. Its copies share it; pickles have none."""

    training: Rewriting | None = None
    evaluation: Rewriting | None = None

    def __reduce__(self) -> Any:
        return Rewritings, ()


def compile_graph(
    graph: OperatorGraph,
    runtime: Runtime,
    backend: str,
    rewrites: Sequence[Pass] | None = None,
    made: Rewriting | None = None,
) -> fx.GraphModule:
    """The graph of a collection as it runs, by ``rewrites`` or ``recfx.passes()``, with their records in ``meta``; or
    what these have ``made`` for a collection of which this is a copy.
    """
    rewriting = rewritten(graph, rewrites) if made is None or made.graph.context != graph.context else made
    _refuse_raw_ids(rewriting.graph)
    return _lowered(rewriting, runtime, backend)


def rewritten(graph: OperatorGraph | Rewriting, rewrites: Sequence[Pass] | None = None) -> Rewriting:
    """What the passes make of the graph of a collection, or of what other passes have made of it."""
    if rewrites is None:
        return run_passes(graph, passes())
    done: list[str] = []
    try:
        rewriting = run_passes(graph, rewrites, lambda name, _: done.append(name))
    except RecfxError:
        raise
    except Exception as error:
        operators = graph.graph if isinstance(graph, Rewriting) else graph
        malformed = isinstance(error, GraphVerificationError)
        failed = f"pass {rewrites[len(done)].name} raised {type(error).__name__}: {error}"
        raise ConversionError(
            f"{error if malformed else failed}.",
            reason="malformed_graph" if malformed else "pass_failed",
            module_path=next(iter(operators.context.collections)),
            what_to_do="mend that pass, or those before it in passes=, or move them: a pass expects the nodes of "
            "recfx.passes() that come before it.",
        ) from error
    _refuse_own_ids(rewriting.graph)
    return rewriting


def _refuse_own_ids(graph: OperatorGraph) -> None:
    """Refuse lookups of sharded collections that read this rank's own ids: a list of passes lacks ``insert_dist``."""
    for lookup in graph.of_kind("lookup", "hash_lookup"):
        if graph.collection(lookup).sharding is not None and not graph.works_on_shards(lookup):
            raise ConversionError(
                f"{lookup.name} reads this rank's own ids, but the collection is sharded: no node before it sends ids "
                "to the ranks that have their rows.",
                reason="not_distributed",
                module_path=graph.collection(lookup).name,
                what_to_do="let insert_dist of recfx.passes() run as well, right after expand_collection, and leave "
                "what it adds.",
            )


def _refuse_raw_ids(graph: OperatorGraph) -> None:
    """Refuse lookups that would take raw ids for rows, as they do if a list of passes lacks ``insert_hash``."""
    for lookup in graph.of_kind("lookup", "hash_lookup"):
        giver = lookup
        while "hashed" not in giver.kwargs and giver.all_input_nodes:
            giver = giver.all_input_nodes[0]
        hashed = names_in(giver, "hashed")
        for table in graph.tables(lookup):
            if table.has_index and not table.never_needs_index and table.name not in hashed:
                raise ConversionError(
                    f"{lookup.name} reads table {table.name!r}, but its ids are raw: no node before it hashes them.",
                    reason="not_hashed",
                    module_path=graph.collection(lookup).name,
                    what_to_do="let insert_hash of recfx.passes() run as well, and leave what it adds.",
                )


def _lowered(rewriting: Rewriting, runtime: Runtime, backend: str) -> fx.GraphModule:
    graph_module = lower_graph(rewriting.graph, rewriting.metas, module_of, runtime, backend)
    graph_module.meta[PASSES_KEY] = rewriting.records
    graph_module.meta[REWRITING_KEY] = rewriting
    return graph_module


REWRITING_KEY = "recfx_rewriting"
"""Where a graph module's ``meta`` has what it was lowered from."""


def context_now(context: CollectionContext, store: TableStore) -> CollectionContext:
    """The context of a collection, with what its tables are like now (``unsupported_bag``)."""
    tables, sharding = context.tables, context.sharding
    names = {table.name: table.name for table in tables}
    if sharding is not None:
        names = {shard.table.name: shard.name for shard in sharding.local()}
    facts, settings = {}, dict[object, int]()
    kernel_groups: dict[str, int] = {}
    for table in tables:
        name = names.get(table.name)
        if name is None:  # it is on other ranks
            facts[table.name] = TableFacts(table.num_embeddings, table.embedding_dim, table.dtype, store.device.type)
            continue
        table_facts = store.facts(name)
        if sharding is not None:  # of one of its shards
            table_facts = replace(table_facts, rows=table.num_embeddings, embedding_dim=table.embedding_dim)
        facts[table.name] = table_facts
        optimizer = store.optimizers.get(name)
        same = store.weight(name).device, None if optimizer is None else optimizer.settings()
        kernel_groups[table.name] = settings.setdefault(same, len(settings))
    return replace(context, facts=facts, kernel_groups=kernel_groups)


FIND_ON_DEVICE = Rewrite("find_on_device", find_on_device)


def graphs_of_modes(
    train_graph: fx.GraphModule, runtime: Runtime, made: Rewritings = Rewritings()
) -> tuple[fx.GraphModule, fx.GraphModule, list[PassRecord], Rewritings]:
    """The graphs of training and of eval mode, which may be one, given the one that finds ids on the host in training;
    what the pass did, and what copies share. Two graphs share their modules, and either has all of them, under the same
    names, for graphs of whole models.
    """
    before: Rewriting = train_graph.meta[REWRITING_KEY]
    if made.training is not before:
        made = Rewritings(before, rewritten(before, (FIND_ON_DEVICE,)))
    assert made.evaluation is not None  # made with ``training``
    rewriting = made.evaluation
    records = list(rewriting.records[len(before.records) :])
    if not any(record.modified for record in records):
        return train_graph, train_graph, [record for record in records if record.declined], made
    eval_graph = _lowered(rewriting, runtime, "auto")
    for one, other in ((train_graph, eval_graph), (eval_graph, train_graph)):
        for name, module in one.named_children():
            if name not in other._modules:
                other.add_submodule(name, module)
    in_turn = any(declined.code == "hashed_in_turn" for record in records for declined in record.declined)
    return train_graph if in_turn else eval_graph, eval_graph, records, made
