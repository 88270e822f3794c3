"""From collections to their part of the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx, nn
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

from recfx.hashing import ResolvedHashConfig
from recfx.inspect import capacity
from recfx.inspect.facts import TableFacts, table_facts
from recfx.inspect.index_facts import IndexFacts
from recfx.inspect.reasons import table_reasons, type_name
from recfx.inspect.report import NodeReport, PassReport
from recfx.inspect.table_report import HashingReport, TableReport
from recfx.ir.meta import node_meta
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import NotFused
from recfx.sharding.collection import ShardedHashEmbeddingBagCollection


def describe_converted(collection: HashEmbeddingBagCollection, path: str, existed: bool) -> dict[str, Any]:
    """The fields of a :class:`CollectionReport` that come from a converted collection.

    Args:
        collection: the collection; nothing of it changes.
        path: its fully qualified name in the model.
        existed: whether its tables were there before recfx.
    """
    tables = [table_report(facts) for facts in table_facts(collection, path, existed)]
    return {
        "is_weighted": collection.is_weighted(),
        "device": str(collection.device),
        "tables": tuple(tables),
        **graph_fields(collection),
        "reasons": tuple(reason for table in tables for reason in table.reasons),
    }


def graph_fields(collection: HashEmbeddingBagCollection | ShardedHashEmbeddingBagCollection) -> dict[str, Any]:
    """What became of the collection's graph, and how."""
    return {
        "nodes": _nodes(collection.graph_module),
        "passes": tuple(PassReport(record.name, record.modified, record.text) for record in collection.pass_records),
        "declined": tuple(declined for record in collection.pass_records for declined in record.declined),
    }


def describe_other(collection: nn.Module) -> dict[str, Any]:
    """The same fields from a collection that was not converted, as far as it shows them."""
    if isinstance(collection, EmbeddingBagCollectionInterface):
        read, holder = "embedding_bag_configs", "embedding_bags"
    elif isinstance(collection, EmbeddingCollectionInterface):
        read, holder = "embedding_configs", "embeddings"
    else:
        return {}
    try:
        configs = list(getattr(collection, read)())
        is_weighted = collection.is_weighted() if read == "embedding_bag_configs" else None
        device = str(getattr(collection, "device", "") or "")
        modules = getattr(collection, holder, {})
        tables = tuple(_other_table(config, modules) for config in configs)
    except Exception:  # somebody else's class, which may implement none of it: then the report has less to show
        return {}
    return {"is_weighted": is_weighted, "device": device, "tables": tables}


def table_report(facts: TableFacts) -> TableReport:
    """One table of a converted collection."""
    spec, weight = facts.spec, facts.weight
    return TableReport(
        name=spec.name,
        features=spec.feature_names,
        embedding_names=spec.embedding_names,
        rows=spec.num_embeddings,
        dim=spec.embedding_dim,
        pooling=spec.pooling,
        dtype=type_name(weight.dtype),
        device=str(weight.device),
        bytes=weight.numel() * weight.element_size(),
        hashing=hashing_report(spec.hashing, facts.index_facts),
        kernel=facts.kernel.name,
        kernels_passed_over=facts.kernel.passed_over,
        optimizer=_optimizer(facts),
        custom_init_fn=spec.custom_init_fn,
        reasons=table_reasons(facts),
    )


def hashing_report(config: ResolvedHashConfig | None, index: IndexFacts | None) -> HashingReport:
    """How ids become rows; ``index``: what one with data shows of itself."""
    if config is None:
        return HashingReport("static")
    if not config.has_index:
        return HashingReport("adopted", rows=config.rows, dense_rows=config.dense_rows)
    found = HashingReport(
        "index",
        rows=config.rows,
        dense_rows=config.dense_rows,
        buckets=config.buckets,
        on_full=config.on_full,
        evict=config.evict if config.evicts else "",
        admit_after=config.admit_after,
        unseen=config.unseen,
        seed=config.seed,
    )
    return found if index is None else replace(found, **_index(index))


def _index(index: IndexFacts) -> dict[str, Any]:
    """The fields of a :class:`HashingReport` that an index with data fills."""
    occupancy = index.occupancy
    return {
        "ids_held": occupancy.taken,
        "occupancy": occupancy.taken / max(occupancy.rows, 1),
        "worst_bucket": occupancy.worst_bucket if index.buckets else None,
        "worst_bucket_occupancy": occupancy.worst_bucket_taken / max(occupancy.worst_bucket_rows, 1),
        "counters": tuple(index.counters.items()),
        "candidates": None if index.candidates is None else index.candidates.waiting,
        "longest_probe": index.longest_probe,
        "index_bytes": index.bytes,
        "usable_share": index.usable_share,
        "room": int(index.room),
        "batches_until_full": capacity.batches_until_full(index),
        "suggested_rows": capacity.suggested_rows(index),
        "rows_here": index.rows,
    }


def _optimizer(facts: TableFacts) -> str:
    if isinstance(facts.optimizer, FusedOptimizer):
        return f"fused {facts.optimizer.kind}"
    if isinstance(facts.optimizer, NotFused):
        return f"in backward, not fused: {facts.optimizer.reason}"
    return "none: gradients to weight.grad" if facts.weight.requires_grad else "none: frozen"


def _nodes(graph_module: fx.GraphModule) -> tuple[NodeReport, ...]:
    nodes = []
    for node in graph_module.graph.nodes:
        meta = node_meta(node)
        if meta is not None:
            dtype = "" if meta.dtype is None else type_name(meta.dtype)
            nodes.append(
                NodeReport(
                    node.name,
                    meta.kind,
                    meta.tables,
                    meta.made_by,
                    meta.shape,
                    dtype,
                    meta.bytes,
                    meta.device,
                    meta.kernel,
                )
            )
    return tuple(nodes)


def _other_table(config: BaseEmbeddingConfig, modules: Any) -> TableReport:
    """From the config, and from the weight where there is a module for the table."""
    weight = getattr(dict(modules.items()).get(config.name), "weight", None)
    bits = DATA_TYPE_NUM_BITS[config.data_type]
    dtype, device, size = config.data_type.name, "", config.num_embeddings * config.embedding_dim * bits // 8
    if isinstance(weight, nn.Parameter):
        dtype, device, size = type_name(weight.dtype), str(weight.device), weight.numel() * weight.element_size()
    pooling = getattr(config, "pooling", None)
    return TableReport(
        name=config.name,
        features=tuple(config.feature_names),
        embedding_names=tuple(config.feature_names),
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        pooling="" if pooling is None else pooling.name,
        dtype=dtype,
        device=device,
        bytes=size,
    )
