"""What is worth saying about how a table is sharded: one small rule per reason, in one literal list."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.errors import Diagnostic, Severity, few
from recfx.hashing import HashIndex
from recfx.inspect.sent_share import shares_of_sent
from recfx.inspect.table_report import TableReport
from recfx.ir.shards import ShardedTable
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.printing.grid import size
from recfx.runtime import FindRows, SelectFeatures
from recfx.runtime.transfers import crosses
from recfx.versions.differences import BaseForward

LARGE_GRADIENTS = 64 * 2**20
"""Bytes of dense gradients per step from which on a report warns. With one table of 64 columns and 20,480 ids a batch,
a step of SGD took one core 3.5 ms at 16 MiB, 37 ms at 64 MiB and 136 ms at 256 MiB; 1 ms at each, in backward."""
UNEVEN = 1.25  # size of the largest piece, relative to the mean


def sharding_reasons(table: ShardedTable, path: str, optimizer: FusedOptimizer | None) -> tuple[Diagnostic, ...]:
    """Every rule's answer for one table, whose module is at ``path``."""
    return tuple(reason for rule in _RULES if (reason := rule(table, path, optimizer)) is not None)


def ranks_without_rows(table: ShardedTable, path: str, _: FusedOptimizer | None) -> Diagnostic | None:
    """Fewer rows, or buckets of rows, than pieces."""
    pieces, config = table.row_pieces, table.table.hashing
    empty = [shard.rank for shard in pieces if shard.is_empty]
    if not empty:
        return None
    if config is None or not table.table.has_index:
        message = f"{table.table.num_embeddings:,} rows are split over {len(pieces)} ranks: ranks {empty} get none."
        advice = "table_wise or data_parallel serves so small a table better."
        return Diagnostic("ranks_without_rows", path, message, advice)
    message = f"its {config.buckets} buckets are split over {len(pieces)} ranks: ranks {empty} get no rows and no work."
    advice = f"give HashConfig(buckets=...) a multiple of {len(pieces)}, before the table has learned any ids."
    return Diagnostic("ranks_without_rows", path, message, advice, Severity.WARNING)


def never_called(path: str) -> Diagnostic:
    """A sample was traced, and the collection at ``path`` was not called."""
    message = "calling the model with the sample never reaches this collection, in train or eval mode."
    advice = "check the sample, or call the collection; what is converted does not depend on it."
    return Diagnostic("never_called", path, message, advice, Severity.WARNING)


def uneven_cuts(table: ShardedTable, path: str, _: FusedOptimizer | None) -> Diagnostic | None:
    """Some rank has far more rows than others."""
    sizes = [shard.num_rows for shard in table.row_pieces]
    if not sizes or min(sizes) == 0 or max(sizes) * len(sizes) < UNEVEN * sum(sizes):
        return None
    message = f"its rows are split unevenly: ranks hold {min(sizes):,} to {max(sizes):,} of {sum(sizes):,}."
    advice = "nothing if that is intended; cuts of an index are at borders of buckets, and more buckets make them even."
    return Diagnostic("uneven_cuts", path, message, advice)


def optimizer_state_per_column_block(
    table: ShardedTable, path: str, optimizer: FusedOptimizer | None
) -> Diagnostic | None:
    """The optimizer keeps one number per row of each column block."""
    blocks = len(table.column_blocks)
    changed = None if blocks < 2 or optimizer is None else optimizer.rule.when_columns_are_cut(blocks)
    return None if changed is None else Diagnostic("optimizer_state_per_column_block", path, *changed)


def expanded_reasons(graph_module: nn.Module, path: str) -> tuple[Diagnostic, ...]:
    """Whether a batch had features with their own batch sizes, of which TorchRec's collections send less."""
    if not any(isinstance(node, SelectFeatures) and node.has_expanded for node in graph_module.children()):
        return ()
    message = "a batch had features with their own batch sizes: they are expanded before ids are sent."
    advice = "expect more ids on the wire than with TorchRec; deduplicate after the collection where that matters."
    return (Diagnostic("variable_batch_expanded", path, message, advice),)


def sent_once_reasons(collection: ConvertedCollection, path: str) -> tuple[Diagnostic, ...]:
    """How many ids were different, beside what was expected, for each table that sends these once; and why a table does
    not, for which a user has asked.
    """
    reasons, shares = [], shares_of_sent(collection)
    for table in collection.tables:
        share, why = shares.get(table.name), table.why_sent_as_they_come
        if why is not None and (table.dedup.asked or table.dedup.share is not None):
            advice = "see which tables send different ids once, in the documentation of sharded collections."
            reasons.append(Diagnostic(why.code, kind_of(collection).table_path(path, table.name), why.message, advice))
        if share is None:
            continue
        expected = "" if table.dedup.share is None else f"; {table.dedup.share:.1%} of all were expected to be"
        different, ids = share.so_far()
        measured = f"{different / ids:.1%} of {ids:,} ids were different" if ids else "no ids were sent yet"
        message = f"each different id of a key is sent once: in training on this rank, {measured}{expected}."
        advice = "give the share that was measured to convert(dedup=) if it is far from the expected one."
        reasons.append(Diagnostic("ids_sent_once", kind_of(collection).table_path(path, table.name), message, advice))
    return tuple(reasons)


def dense_gradient_reasons(tables: Iterable[TableReport], path: str, trains: bool) -> tuple[Diagnostic, ...]:
    """Tables of the collection at ``path`` whose backward writes gradients as large as they are, if these are large."""
    dense = [table for table in tables if table.has_dense_gradient] if trains else []
    written = sum(table.bytes_here for table in dense)
    if written < LARGE_GRADIENTS:
        return ()
    message = (
        f"no optimizer runs in backward for {few([table.name for table in dense], 4)}: each step of training clears, "
        f"writes and reads {size(written)} of gradients (weight.grad), as large as the tables."
    )
    advice = "call apply_optimizer_in_backward of torchrec.optim, or eval() if it is not trained."
    return (Diagnostic("dense_gradients", path, message, advice),)


def pipelining_reasons(sharded: ShardedCollection, path: str) -> tuple[Diagnostic, ...]:
    """Whether one of TorchRec's pipelines has taken it over; ``recfx.TrainPipeline`` has a report of its own."""
    if not isinstance(sharded.forward, BaseForward):
        return ()
    message = f"a TorchRec pipeline sends the next batch's ids ahead ({type(sharded.forward).__name__})."
    return (Diagnostic("pipelined", path, message, "nothing: detach the pipeline to have a plain forward again."),)


_RULES: tuple[Callable[[ShardedTable, str, FusedOptimizer | None], Diagnostic | None], ...] = (
    ranks_without_rows,
    uneven_cuts,
    optimizer_state_per_column_block,
)


def transfer_reasons(collection: ConvertedCollection, path: str) -> tuple[Diagnostic, ...]:
    """Where the ids of the collection, which is at ``path``, are hashed, if its tables are on a device.

    Also why its ids are hashed on the host although ``HashConfig.find_on_device`` is set.
    """
    device = collection.store.device
    indexes = [index for index in collection.hash_indexes.values() if isinstance(index, HashIndex)]
    nodes = [module for module in collection.graph_of(training=False).children() if isinstance(module, FindRows)]
    in_eval = bool(nodes) and not any(node.finds_on_host for node in nodes)
    in_training = in_eval and all(node.inserts for node in nodes)
    reasons = []
    if any(crosses(device, index.row_ids.device) for index in indexes):
        reasons.append(_where_ids_are_hashed(collection, path, nodes, in_eval, in_training))
    if any(table.finds_on_device for table in collection.tables) and not in_training and device.type != "meta":
        message = f"find_on_device=True does nothing: {_why_on_host(collection, nodes)}"
        reasons.append(Diagnostic("find_on_device_not_used", path, message, "nothing: rows do not depend on it."))
    return tuple(reasons)


def _where_ids_are_hashed(
    collection: ConvertedCollection, path: str, nodes: list[FindRows], in_eval: bool, in_training: bool
) -> Diagnostic:
    copies = f"copies of the indexes that take {sum(node.copies.bytes for node in nodes)} bytes there"
    if in_training:
        message = (
            f"its rows are found on {collection.store.device} (node find_rows), in {copies}; only ids without a row "
            "are copied to the host, which gives them one."
        )
        return Diagnostic("found_on_device", path, message, "nothing; recfx.TrainPipeline hashes no ids ahead.")
    in_eval_mode = f"it finds them there, in {copies}" if in_eval else f"too, because {_why_on_host(collection, nodes)}"
    message = (
        f"its tables are on {collection.store.device}, but each forward in training copies ids to the host, where the "
        f"indexes are, and their rows back (nodes to_host and to_device); in eval mode {in_eval_mode}"
    )
    advice = (
        "nothing; recfx.TrainPipeline copies the next batch's ids ahead, and hashes them while the device computes."
    )
    return Diagnostic("hashed_on_host", path, message, advice)


def _why_on_host(collection: ConvertedCollection, nodes: list[FindRows]) -> str:
    """Why rows are found on the host, in training or in both modes."""
    here = [node.finds_on_host for node in nodes if node.finds_on_host]
    if here:
        return here[0]
    if collection.is_sharded:
        return "rows of sharded tables are found on the host only."
    declined = [why for record in collection.pass_records for why in record.declined if why.by == "find_on_device"]
    if declined:
        return declined[0].message
    if collection.store.device.type == "cpu":
        return "its tables are on the host, where the indexes are."
    return (
        "the nodes of its graph are part of a graph of the whole model, which was made when its tables were elsewhere."
    )
