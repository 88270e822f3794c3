"""Tables of several collections that share one weight: if their ids are raw, they share one index as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.discovery.classify import Finding
from recfx.errors import ConversionError, Diagnostic
from recfx.ir.tables import TableSpec


@dataclass(frozen=True)
class _Owner:
    """The first table of a weight."""

    collection: UnshardedCollection
    spec: TableSpec
    weight_name: str
    is_learned: bool


class TiedTables:
    """Lets tables of one weight share one index; every converted collection is shown to it."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}

    def tie(self, converted: UnshardedCollection, finding: Finding) -> None:
        """Give the tables of a collection that nothing has trained yet the indexes of tables of the same weights.

        Raises:
            ConversionError: ``tied_tables``, if one of two tables has an index and they cannot share it.
        """
        shared, owners = [], {**self._owners}
        for spec in converted.tables:
            weight_name = kind_of(converted).weight_name(finding.path, spec.name)
            mine = _Owner(converted, spec, weight_name, spec.name in finding.learned)
            owner = owners.setdefault(id(converted.weight(spec.name)), mine)
            if owner is mine or not (spec.has_index or owner.spec.has_index):
                continue
            if (why := _why_not(owner, mine)) is not None:
                raise ConversionError(
                    f"table {spec.name!r} shares its weight with {owner.weight_name}, and {why}.",
                    reason="tied_tables",
                    module_path=finding.path,
                    what_to_do="give both tables the same HashConfig, without eviction, and initial weights; or use "
                    "one table for both features; or leave the ids of both dense.",
                )
            shared.append((spec.name, owner))
        self._owners = owners  # nobody ties tables to those of a collection that is refused
        for table, owner in shared:
            converted.share_index(table, owner.collection, owner.spec.name)


def _why_not(owner: _Owner, other: _Owner) -> str | None:
    """Why two tables of one weight cannot share an index."""
    if owner.collection is other.collection:
        return "a collection looks the ids of its tables up at the same time, each table in an index of its own"
    if owner.spec.hashing != other.spec.hashing:
        return "they have different hashing, which one index cannot follow"
    if owner.is_learned or other.is_learned:
        return "a managed-collision module has learned which rows its ids have"
    if owner.spec.evicts:
        return "one collection could evict ids whose rows a batch of the other has yet to train"
    if _initial_weights(owner) != _initial_weights(other):
        return "they give new rows different initial weights"
    return None


def _initial_weights(table: _Owner) -> tuple[object, ...]:
    own = table.collection.init_fn(table.spec.name) if table.spec.custom_init_fn else None
    return table.spec.weight_init_min, table.spec.weight_init_max, own


def mark_shared_weights(model: nn.Module) -> None:
    """Let every converted collection know which other tables and modules of ``model`` have its weights as well."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            names.setdefault(id(parameter), []).append(f"{path}.{name}".removeprefix("."))
    for path, module in model.named_modules():
        if isinstance(module, UnshardedCollection):
            holders = {spec.name: names.get(id(module.weight(spec.name)), []) for spec in module.tables}
            module.store.shared_weights = {
                table: [name for name in of_table if name != kind_of(module).weight_name(path, table)]
                for table, of_table in holders.items()
                if len(of_table) > 1
            }


def notes_on_tied(model: nn.Module, collections: Iterable[tuple[Finding, nn.Module]]) -> list[Diagnostic]:
    """What is worth saying about weights of tables with an index that other tables or modules of ``model`` have too."""
    names: dict[int, list[str]] = {}
    of_tables: set[str] = set()
    for finding, converted in collections:
        if not isinstance(converted, UnshardedCollection):
            continue
        kind = kind_of(converted)
        of_tables |= {kind.weight_name(path, spec.name) for path in finding.paths for spec in converted.tables}
        for spec in converted.tables:
            if spec.has_index:
                names.setdefault(id(converted.weight(spec.name)), []).append(kind.weight_name(finding.path, spec.name))
    notes = [
        Diagnostic(
            "tied_index",
            tables[0].removesuffix(".weight"),
            f"{', '.join(tables)} are one weight, so they share one index: an id has the same row in each.",
            "nothing; states have the index under each name.",
        )
        for tables in names.values()
        if len(tables) > 1
    ]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names and name not in of_tables:
            table = names[id(parameter)][0].removesuffix(".weight")
            message = f"{name} is the weight of {table}: what it computes is by row, and rows are not ids there."
            advice = "find the rows of ids with index(table).find(ids), and the ids of rows with index(table).items()."
            notes.append(Diagnostic("rows_read_elsewhere", table, message, advice))
    return notes
