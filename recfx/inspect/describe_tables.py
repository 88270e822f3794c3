"""Fills the report of a table from what is known about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig

from recfx.errors import Diagnostic
from recfx.hashing import ResolvedHashConfig
from recfx.inspect import capacity
from recfx.inspect.facts import TableFacts
from recfx.inspect.index_facts import IndexFacts
from recfx.inspect.reasons import table_reasons, type_name
from recfx.inspect.table_report import HashingReport, TableReport
from recfx.ir.tables import TableSpec
from recfx.optim.fused_optimizer import FusedOptimizer


def table_report(facts: TableFacts) -> TableReport:
    """A table of a converted collection, or this rank's part of one."""
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


def report_of_table_elsewhere(spec: TableSpec, dtype: torch.dtype) -> TableReport:
    """A table of a sharded collection of which this rank has no part."""
    return TableReport(
        name=spec.name,
        features=spec.feature_names,
        embedding_names=spec.embedding_names,
        rows=spec.num_embeddings,
        dim=spec.embedding_dim,
        pooling=spec.pooling,
        dtype=type_name(dtype),
        device="",
        bytes=0,
        hashing=hashing_report(spec.hashing, None),
        custom_init_fn=spec.custom_init_fn,
    )


def report_of_other_table(config: BaseEmbeddingConfig, modules: Any) -> TableReport:
    """A table of a collection that was not converted.

    Args:
        config: the config of the table.
        modules: the modules that hold the weights, by table name, if the collection has any.
    """
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


def hashing_report(config: ResolvedHashConfig | None, index: IndexFacts | None) -> HashingReport:
    """How ids become rows; ``index`` is what an index with data shows."""
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
    return found if index is None else _with_counts(found, index)


def _with_counts(found: HashingReport, index: IndexFacts) -> HashingReport:
    """Add the fields that only an index with data fills."""
    occupancy = index.occupancy
    return replace(
        found,
        ids_held=occupancy.taken,
        occupancy=occupancy.taken / max(occupancy.rows, 1),
        worst_bucket=occupancy.worst_bucket if index.buckets else None,
        worst_bucket_occupancy=occupancy.worst_bucket_taken / max(occupancy.worst_bucket_rows, 1),
        counters=tuple(index.counters.items()),
        candidates=None if index.candidates is None else index.candidates.waiting,
        longest_probe=index.longest_probe,
        index_bytes=index.bytes,
        usable_share=index.usable_share,
        room=int(index.room),
        batches_until_full=capacity.batches_until_full(index),
        suggested_rows=capacity.suggested_rows(index),
        rows_here=index.rows,
    )


def _optimizer(facts: TableFacts) -> str:
    if isinstance(facts.optimizer, FusedOptimizer):
        return f"fused {facts.optimizer.rule.name}"
    if isinstance(facts.optimizer, Diagnostic):
        return f"in backward, not fused: {facts.optimizer.code}"
    return "none: gradients to weight.grad" if facts.weight.requires_grad else "none: frozen"
