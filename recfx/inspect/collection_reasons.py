"""What is worth saying about a collection as a whole, and about how its tables are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.errors import Diagnostic, Severity, few
from recfx.hashing import HashIndex
from recfx.inspect.report_data import TableReport
from recfx.ir.shards import ShardedTable
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.printing.grid import size
from recfx.runtime import FindRows, SelectFeatures
from recfx.runtime.dedup_ids import DedupIds
from recfx.runtime.transfers import crosses
from recfx.versions.differences import BaseForward

LARGE_GRADIENTS = 64 * 2**20
"""Bytes of dense gradients per step from which on a report warns. With one table of 64 columns and 20,480 ids a batch,
a step of SGD took one core 3.5 ms at 16 MiB, 37 ms at 64 MiB and 136 ms at 256 MiB; 1 ms at each, in backward."""
UNEVEN = 1.25  # size of the largest piece, relative to the mean


def never_called(path: str) -> Diagnostic:
    """A sample was traced, and the collection at ``path`` was not called."""
    message = "calling the model with the sample never reaches this collection, in train or eval mode."
    advice = "check the sample, or call the collection; what is converted does not depend on it."
    return Diagnostic("never_called", path, message, advice, Severity.WARNING)


def cut_reasons(table: ShardedTable, optimizer: FusedOptimizer | None) -> Iterator[Diagnostic]:
    """What is worth saying about how one table is cut."""
    pieces, config, blocks = table.row_pieces, table.table.hashing, len(table.column_blocks)
    sizes, empty = [shard.num_rows for shard in pieces], [shard.rank for shard in pieces if shard.is_empty]
    if empty and config is not None and table.table.has_index:
        message = f"its {config.buckets} buckets are split over {len(pieces)} ranks: ranks {empty} get no rows."
        advice = f"give HashConfig(buckets=...) a multiple of {len(pieces)}, before the table has learned any ids."
        yield Diagnostic("ranks_without_rows", "", message, advice, Severity.WARNING)
    elif empty:
        message = f"{table.table.num_embeddings:,} rows are split over {len(pieces)} ranks: ranks {empty} get none."
        advice = "table_wise or data_parallel serves so small a table better."
        yield Diagnostic("ranks_without_rows", "", message, advice)
    elif sizes and max(sizes) * len(sizes) >= UNEVEN * sum(sizes):
        message = f"its rows are split unevenly: ranks hold {min(sizes):,} to {max(sizes):,} of {sum(sizes):,}."
        advice = "nothing if that is intended; an index is cut at borders of buckets, and more buckets make that even."
        yield Diagnostic("uneven_cuts", "", message, advice)
    # The optimizer may keep one number per row of each column block.
    changed = None if blocks < 2 or optimizer is None else optimizer.rule.when_columns_are_cut(blocks)
    if changed is not None:
        yield Diagnostic("optimizer_state_per_column_block", "", *changed)


def sharded_reasons(sharded: ShardedCollection, path: str) -> Iterator[Diagnostic]:
    """What the graph of a sharded collection says about the ids that it sends."""
    nodes = list(sharded.graph_module.children())
    if any(isinstance(node, SelectFeatures) and node.has_expanded for node in nodes):
        message = "a batch had features with their own batch sizes: they are expanded before ids are sent."
        advice = "expect more ids on the wire than with TorchRec; deduplicate after the collection where that matters."
        yield Diagnostic("variable_batch_expanded", path, message, advice)
    if isinstance(sharded.forward, BaseForward):  # recfx.TrainPipeline has a report of its own
        message = f"a TorchRec pipeline sends the next batch's ids ahead ({type(sharded.forward).__name__})."
        yield Diagnostic("pipelined", path, message, "nothing: detach the pipeline to have a plain forward again.")
    path_of, first = partial(kind_of(sharded).table_path, path), 0
    dedup = next((node for node in nodes if isinstance(node, DedupIds)), None)
    for table in sharded.tables:
        keys = slice(first, first := first + len(table.embedding_names))
        expected, why = table.dedup.share, table.why_sent_as_they_come
        if why is not None and (table.dedup.asked or expected is not None):
            advice = "see which tables send different ids once, in the documentation of sharded collections."
            yield Diagnostic(why.code, path_of(table.name), why.message, advice)
        if dedup is None or not table.sends_different:
            continue
        different, ids = sum(dedup.different[keys]), sum(dedup.ids[keys])
        counted = f"{different / ids:.1%} of {ids:,} ids were different" if ids else "no ids were sent yet"
        forecast = "" if expected is None else f"; {expected:.1%} of all were expected to be"
        message = f"each different id of a key is sent once: in training on this rank, {counted}{forecast}."
        advice = "give the share that was measured to convert(dedup=) if it is far from the expected one."
        yield Diagnostic("ids_sent_once", path_of(table.name), message, advice)


def dense_gradient_reasons(tables: Iterable[TableReport], path: str, trains: bool) -> Iterator[Diagnostic]:
    """Tables of the collection at ``path`` whose backward writes gradients as large as they are, if these are large."""
    dense = [table for table in tables if table.has_dense_gradient] if trains else []
    written = sum(table.bytes_here for table in dense)
    if written >= LARGE_GRADIENTS:
        message = (
            f"no optimizer runs in backward for {few([table.name for table in dense], 4)}: each step of training "
            f"clears, writes and reads {size(written)} of gradients (weight.grad), as large as the tables."
        )
        advice = "call apply_optimizer_in_backward of torchrec.optim, or eval() if it is not trained."
        yield Diagnostic("dense_gradients", path, message, advice)


def transfer_reasons(collection: ConvertedCollection, path: str) -> Iterator[Diagnostic]:
    """Where the ids of the collection, which is at ``path``, are hashed, if its tables are on a device."""
    device = collection.store.device
    indexes = [index for index in collection.hash_indexes.values() if isinstance(index, HashIndex)]
    if not any(crosses(device, index.row_ids.device) for index in indexes):
        return
    nodes = [module for module in collection.graph_of(training=False).children() if isinstance(module, FindRows)]
    eval_mode = f"too, because {_why_on_host(collection, nodes)}"
    if nodes and not any(node.finds_on_host for node in nodes):
        taken = sum(node.copies.bytes for node in nodes)
        eval_mode = f"it finds them there, in copies of the indexes that take {taken} bytes there"
    message = (
        f"its tables are on {device}, but each forward in training copies ids to the host, where the indexes are, "
        f"and their rows back (nodes to_host and to_device); in eval mode {eval_mode}"
    )
    advice = "nothing; recfx.TrainPipeline copies the next batch's ids ahead, and hashes them in the meantime."
    yield Diagnostic("hashed_on_host", path, message, advice)


def _why_on_host(collection: ConvertedCollection, nodes: list[FindRows]) -> str:
    """Why rows are found on the host in both modes."""
    declined = [why for record in collection.pass_records for why in record.declined if why.by == "find_on_device"]
    reasons = [node.finds_on_host for node in nodes if node.finds_on_host]
    reasons += ["rows of sharded tables are found on the host only."] if collection.is_sharded else []
    reasons += [why.message for why in declined]
    return [*reasons, "its nodes are in a graph of the whole model that was made when its tables were elsewhere."][0]
