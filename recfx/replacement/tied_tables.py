"""Tables, and other modules, that share one weight."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.discovery.classify import Finding
from recfx.errors import ConversionError, Diagnostic
from recfx.ir.tables import TableSpec


class TiedTables:
    """Refuses tables of one weight if one of them has an index; every converted collection is shown to it."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[str, TableSpec]] = {}  # the first table of each weight, and the weight's name

    def check(self, converted: UnshardedCollection, path: str) -> None:
        """Raise a ``ConversionError``, ``tied_tables``, if two tables share a weight, and one of them has an index."""
        owners = {**self._owners}
        for spec in converted.tables:
            mine = kind_of(converted).weight_name(path, spec.name), spec
            name, other = owners.setdefault(id(converted.weight(spec.name)), mine)
            if other is not spec and (spec.has_index or other.has_index):
                raise ConversionError(
                    f"table {spec.name!r} shares its weight with {name}, and each index would give its rows to other "
                    "ids.",
                    reason="tied_tables",
                    module_path=path,
                    what_to_do="use one table for both features, or leave the ids of both dense.",
                )
        self._owners = owners  # not those of a collection that is refused


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
    """What is worth saying about weights of tables with an index that other modules of ``model`` have too."""
    names: dict[int, str] = {}
    of_tables: set[str] = set()
    for finding, converted in collections:
        if not isinstance(converted, UnshardedCollection):
            continue
        kind = kind_of(converted)
        of_tables |= {kind.weight_name(path, spec.name) for path in finding.paths for spec in converted.tables}
        for spec in converted.tables:
            if spec.has_index:
                names[id(converted.weight(spec.name))] = kind.weight_name(finding.path, spec.name)
    notes = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names and name not in of_tables:
            table = names[id(parameter)].removesuffix(".weight")
            message = f"{name} is the weight of {table}: what it computes is by row, and rows are not ids there."
            advice = "find the rows of ids with index(table).find(ids), and the ids of rows with index(table).items()."
            notes.append(Diagnostic("rows_read_elsewhere", table, message, advice))
    return notes
