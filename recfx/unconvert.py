"""``recfx.unconvert``: the way back to standard collections."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recfx.collection import HashEmbeddingBagCollection, converted_collections
from recfx.conversion import detach_conversion
from recfx.discovery import check_module
from recfx.errors import ConversionError
from recfx.islands import carry_hooks, carry_over
from recfx.load_guard import release_loading
from recfx.shells import copy_shells
from recfx.training.in_backward import attach_unfused
from recfx.whole_graph import WholeGraph

RowsOfIds = dict[str, tuple[torch.Tensor, torch.Tensor]]


def unconvert(model: nn.Module, with_mapping: bool = False) -> nn.Module | tuple[nn.Module, RowsOfIds]:
    """Give the model back with standard ``EmbeddingBagCollection``s around the same parameters.

    Args:
        model: a converted model; one without converted collections comes back as it is.
        with_mapping: allow tables whose index holds ids, and return which row belongs to which id: the standard
            collection takes rows, so ids must be mapped before they reach it.

    Returns:
        the model in new module objects; with ``with_mapping`` also ``{table: (ids, rows)}``, int64 ``[n]`` each,
        for every table that has an index (``<collection>.<table>`` where two collections have a table of that name).

    Raises:
        ConversionError: ``index_holds_ids``: a standard collection cannot express the table.
    """
    check_module(model)
    if isinstance(model, WholeGraph):
        model = model.python_model
    islands = converted_collections(model)
    if not with_mapping:
        for path, island in islands.items():
            _refuse_held_ids(path, island)
    mapping = _mapping(islands)
    replacements: dict[int, nn.Module] = {id(island): _standard(island) for island in islands.values()}
    plain, _ = copy_shells(model, replacements)
    detach_conversion(plain)
    release_loading(plain)
    return (plain, mapping) if with_mapping else plain


def _refuse_held_ids(path: str, island: HashEmbeddingBagCollection) -> None:
    for table in island.hash_indexes:
        held = len(island.index(table))
        if held:
            raise ConversionError(
                f"the index of table {table!r} holds {held} ids, which a standard collection cannot express.",
                reason="index_holds_ids",
                module_path=path,
                what_to_do="call unconvert(model, with_mapping=True) and map ids to rows before the plain model.",
            )


def _mapping(islands: dict[str, HashEmbeddingBagCollection]) -> RowsOfIds:
    names = [table for island in islands.values() for table in island.hash_indexes]
    mapping: RowsOfIds = {}
    for path, island in islands.items():
        for table in island.hash_indexes:
            mapping[table if names.count(table) == 1 else f"{path}.{table}"] = island.index(table).items()
    return mapping


def _standard(island: HashEmbeddingBagCollection) -> EmbeddingBagCollection:
    standard = EmbeddingBagCollection(island.embedding_bag_configs(), island.is_weighted(), torch.device("meta"))
    bags, _ = copy_shells(island.embedding_bags)
    standard.embedding_bags = bags
    standard._device = island.device
    for table, optimizer in island.fused_optimizers().items():
        attach_unfused(bags.get_submodule(table).weight, optimizer)  # type: ignore[arg-type]
    carry_hooks(island, standard)
    carry_over(island, standard, skip=island.own_names())
    return standard.train(island.training)
