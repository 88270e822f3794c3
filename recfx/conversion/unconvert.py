"""``recfx.unconvert``: back to standard collections."""

import logging
from typing import Any

from torch import nn

from recfx.collections.collection import unsharded_collections
from recfx.collections.copy_modules import copy_modules, refuse_fully_sharded, standard_collection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.gather import gather_collections, held_ids, unsharded_collection, without_model_parallel
from recfx.collections.whole_graph import WholeGraph, refuse_graph
from recfx.conversion.rows_of_ids import RowsOfIds
from recfx.errors import GROW, ConversionError
from recfx.errors.argument_types import typed
from recfx.ir.meta import node_meta
from recfx.models.conversion_record import detach_conversion
from recfx.optim.in_backward import attach_unfused
from recfx.optim.keyed_optimizer import detach_fused_optimizer
from recfx.runtime.lower_graph import OWN_MAKERS

_log = logging.getLogger("recfx")


@typed(ConversionError)
def unconvert(model: nn.Module, with_mapping: bool = False) -> nn.Module | tuple[nn.Module, RowsOfIds]:
    """Return the model with standard collections around the same parameters.

    Operators that passes of the user's have put into the graphs are not part of them; a warning is logged then.

    Example:
        >>> model = recfx.unconvert(recfx.convert(Model()))
        >>> type(model.ebc).__name__
        'EmbeddingBagCollection'
        >>> model, mapping = recfx.unconvert(recfx.convert(model), with_mapping=True)
        >>> output = model(mapping.to_rows(batch))

    Args:
        model: a converted model; of any other, only the modules are new. With sharded collections, also inside
            ``DistributedModelParallel``, every rank calls this, and gets whole tables on the CPU.
        with_mapping: allow tables whose index holds ids, and return which row belongs to which id: the standard
            collection takes rows, so ids must be mapped before they reach it.

    Returns:
        the model in new module objects; with ``with_mapping`` also ``{table: (ids, rows)}``, int64 ``[n]`` each,
        for every table that has an index (``<collection>.<table>`` if two collections have a table of that name). Its
        :meth:`recfx.conversion.rows_of_ids.RowsOfIds.to_rows` maps a batch.

    Raises:
        ConversionError: ``index_holds_ids``: a standard collection cannot express the table; ``fully_sharded``;
            ``traced_graph``; ``no_process_group``: that of a sharded model was destroyed.
        CheckpointError: the state that was loaded in place into an index is not valid; raised on all ranks.
    """
    refuse_graph(model, ConversionError)
    if isinstance(model, WholeGraph):
        model = model.python_model
    model = without_model_parallel(model)
    refuse_fully_sharded(model, "call recfx.unconvert first and fully_shard afterwards.")
    collections, sharded = unsharded_collections(model), sharded_collections(model)
    whole = gather_collections(model)
    items = {
        (path, table): collection.index(table).items()
        for path, collection in collections.items()
        for table in collection.hash_indexes
    }
    items |= {
        (path, name): held_ids(table) for path, tables in whole.items() for name, table in tables.items() if table.index
    }
    for (path, table), (ids, _) in items.items() if not with_mapping else ():
        if ids.numel():
            raise ConversionError(
                f"the index of table {table!r} holds {ids.numel()} ids, which a standard collection cannot express.",
                reason="index_holds_ids",
                module_path=path,
                what_to_do="call unconvert(model, with_mapping=True) and give the plain model mapping.to_rows(batch). "
                f"If you only want more rows, do not unconvert. {GROW}",
            )
    for path, collection in (*collections.items(), *sharded.items()):
        kinds = {meta.kind for node in collection.graph_module.graph.nodes if (meta := node_meta(node)) is not None}
        if own := sorted(kinds.intersection(OWN_MAKERS)):
            _log.warning(
                "collection %r is standard again, without the operators of your passes [own_operators_dropped]: "
                "compute what %s computed in the model itself.", path, " and ".join(own)
            )  # fmt: skip
    mapping = RowsOfIds(items, {**collections, **sharded})
    replacements: dict[int, nn.Module] = {}
    for collection in collections.values():
        standard = replacements[id(collection)] = standard_collection(collection)
        tables: Any = kind_of(collection).tables_of(standard)
        for table, optimizer in collection.fused_optimizers().items():
            attach_unfused(tables[table].weight, optimizer)
    replacements |= {id(module): unsharded_collection(module, whole[path]) for path, module in sharded.items()}
    plain, _ = copy_modules(model, replacements)
    detach_conversion(plain)
    detach_fused_optimizer(plain)
    return (plain, mapping) if with_mapping else plain
