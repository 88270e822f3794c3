"""Replaces each standard collection with a converted one around the same parameters."""

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from recfx.collections.collection import OWN_NAMES, UnshardedCollection, unsharded_collections
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.copy_modules import attributes, carry_hooks, carry_over, copy_modules
from recfx.collections.hash_collections import CONVERTED_CLASSES
from recfx.collections.kinds import describe_tables, kind_of
from recfx.errors import ConversionError, Diagnostic, did_you_mean, few, type_of
from recfx.hashing import HashConfig
from recfx.hashing.learned_maps import config_of_learned
from recfx.ir.dedup import Dedup
from recfx.ir.tables import IdRange, TableSpec
from recfx.models.classify import CONVERTED, CONVERTIBLE, Finding
from recfx.models.discover import discover
from recfx.models.resize_tables import TableResizing
from recfx.optim.attached import attached_optimizers
from recfx.passes import Pass

Hashing = HashConfig | Mapping[str, HashConfig | None] | None

Asked = bool | Literal["auto"] | Mapping[str, bool | float]
"""The ``dedup`` of ``recfx.convert``: which tables send each different id once."""

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def replace_collections(
    findings: list[Finding],
    hashing: Hashing,
    backend: str,
    resizing: TableResizing,
    keep_refused: bool = False,
    passes: tuple[Pass, ...] | None = None,
    dedup: Asked = "auto",
) -> dict[int, nn.Module]:
    """One converted collection per finding, by the ``id`` of the collection that it replaces. With ``keep_refused``, a
    collection whose tables cannot be converted is kept, and its finding says why.
    """
    check_table_names(findings, hashing, dedup)
    replacements: dict[int, nn.Module] = {}
    owners: dict[int, tuple[str, TableSpec]] = {}
    for finding in findings:
        before = resizing.mark()
        try:
            converted = _replace_collection(finding, hashing, backend, resizing, passes, dedup)
            owners = _refuse_tied(owners, converted, finding.path)
        except ConversionError as error:
            if not keep_refused:
                raise
            resizing.undo(before)
            finding.refuse(error.diagnostic)
            continue
        replacements[id(finding.module)] = converted
    return replacements


def _replace_collection(
    finding: Finding,
    hashing: Hashing,
    backend: str,
    resizing: TableResizing,
    passes: tuple[Pass, ...] | None,
    dedup: Asked,
) -> UnshardedCollection:
    standard: Any = finding.module
    kind = kind_of(standard)
    _refuse_names_taken(standard, CONVERTED_CLASSES[kind], finding.path)
    copied, _ = copy_modules(standard)
    tables, configs, is_weighted = kind.tables_of(copied), kind.configs_of(standard), kind.is_weighted(standard)
    by_table = {config.name: config_for(config.name, hashing) for config in configs}
    by_table |= {
        name: config_of_learned(learned, by_table[name], name, finding.path)
        for name, learned in finding.learned.items()
    }
    before = {name: resizing.rows_before(tables[name].weight) for name in by_table}
    of_ids = {name: _keep_dense(config, before[name]) for name, config in by_table.items()}
    specs = describe_tables(kind, configs, tables, of_ids, is_weighted, adopt=True, collection=finding.path)
    specs = tuple(
        replace(spec, id_range=_id_range(spec, finding.id_ranges), dedup=dedup_of(spec.name, dedup)) for spec in specs
    )
    for spec, config in zip(specs, configs, strict=True):
        holder: Any = tables[spec.name]
        if spec.num_embeddings > holder.weight.shape[0]:
            learned = spec.name in finding.learned
            resizing.resize(holder.weight, spec.num_embeddings, finding.path, config, spec.custom_init_fn, learned)
        holder.num_embeddings = spec.num_embeddings
    converted = CONVERTED_CLASSES[kind].from_tables(
        standard, specs, tables, standard.device, finding.path, standard=type(standard), backend=backend,
        source=finding.source, requested=by_table, calls=finding.calls, passes=passes,
    )  # fmt: skip
    for name, learned in finding.learned.items():
        learned.fill(converted.index(name), converted.weight(name))
    converted.train(standard.training)  # before it gets the user's modules, which have their own modes
    carry_over(copied, converted)
    carry_hooks(standard, converted)
    carry_attributes(standard, converted)
    return converted


def _refuse_names_taken(standard: nn.Module, replacement: type[UnshardedCollection], path: str) -> None:
    """Refuse attributes of the user's, of the class or the object, whose names the converted collection uses."""
    of_torchrec = kind_of(standard).standard
    bases = type(standard).__mro__[: type(standard).__mro__.index(of_torchrec)]
    of_class = {name for base in bases for name in vars(base) if not (name[:2] == "__" or hasattr(of_torchrec, name))}
    own = {*OWN_NAMES, *(name for name in dir(replacement) if isinstance(getattr(replacement, name), property))}
    of_object = {name for name in own & standard.__dict__.keys() if not name.startswith("_")}
    for name in sorted(of_object | (of_class & {*OWN_NAMES, *dir(replacement)})):
        raise ConversionError(
            f"{type(standard).__name__} has an attribute {name!r}, but the converted collection uses that name.",
            reason="attribute_conflict",
            module_path=path,
            what_to_do=f"rename the attribute {name!r}.",
        )


def _id_range(table: TableSpec, known: Mapping[str, IdRange]) -> IdRange | None:
    """The range of all ids that the table may get; None if it is not known of one of its features."""
    ranges = [known.get(feature) for feature in table.feature_names]
    known_ranges = [range_ for range_ in ranges if range_ is not None]
    return functools.reduce(operator.or_, known_ranges) if known_ranges and len(known_ranges) == len(ranges) else None


def carry_attributes(standard: nn.Module, converted: nn.Module) -> None:
    """Give ``converted`` the plain attributes of ``standard``; what they refer to is replaced later."""
    if not isinstance(converted, ConvertedCollection):
        return
    own = converted.own_names() | _OF_EVERY_MODULE
    for name, value in attributes(standard):
        if name in converted.__dict__ and name not in own:
            converted.__dict__[name] = value


def _keep_dense(config: HashConfig | None, rows_before: int | None) -> HashConfig | None:
    """The config of a table whose weight has got more rows than it had, for another table: these are not dense."""
    if config is None or config.dense_rows is not None or rows_before is None:
        return config
    return replace(config, dense_rows=rows_before)


def config_for(table: str, hashing: Hashing) -> HashConfig | None:
    """The config of one table, from what the user gave for all tables."""
    if isinstance(hashing, Mapping):
        return hashing.get(table, HashConfig())
    return hashing


def check_asked(asked: Any) -> None:
    """Refuse what is neither a setting nor a dict from table names to settings: ``invalid_argument``."""
    wrong: list[Any] = []
    if isinstance(asked, Mapping):
        for table, value in asked.items():
            is_share = isinstance(value, (int, float)) and 0 < value <= 1
            if not isinstance(table, str) or not (isinstance(value, bool) or is_share):
                wrong = [{table: value}]
    elif not isinstance(asked, bool) and asked != "auto":
        wrong = [asked]
    if wrong:
        raise ConversionError(
            f"dedup is {wrong[0]!r}.",
            reason="invalid_argument",
            what_to_do="pass 'auto', True or False; or a dict from table names to True, False, or the expected share "
            "of different ids, above 0 and at most 1.",
        )


def dedup_of(table: str, asked: Asked) -> Dedup:
    """What is asked of one table."""
    value = asked.get(table, "auto") if isinstance(asked, Mapping) else asked
    if isinstance(value, bool):
        return Dedup(asked=value)
    return Dedup() if isinstance(value, str) else Dedup(share=float(value))


def check_table_names(findings: list[Finding], hashing: Hashing, dedup: Asked) -> None:
    """Refuse tables that no collection has, and what is no config, in ``hashing`` and ``dedup``."""
    modules = [finding.module for finding in findings]
    known = dict.fromkeys(config.name for module in modules for config in kind_of(module).configs_of(module))
    for argument, given in (("dedup", dedup), ("hashing", hashing)):
        tables = dict(given) if isinstance(given, Mapping) else {}
        for table, config in tables.items():
            is_config = argument == "dedup" or config is None or isinstance(config, HashConfig)
            if not isinstance(table, str) or not is_config:
                raise ConversionError(
                    f"{argument} of table {table!r} is {type_of(config)}.",
                    reason="invalid_argument",
                    what_to_do="name tables as their configs do, and pass a recfx.HashConfig, or None (static).",
                )
        if unknown := sorted(tables.keys() - known.keys()):
            raise ConversionError(
                f"{argument} names {unknown[0]!r}, which no collection has{did_you_mean(unknown[0], known)}.",
                reason="unknown_table",
                what_to_do=f"use table names: {few(list(known), 20)}.",
            )


# What collections would become, to look at: the model stays as it is, and no table is allocated


def as_converted(model: nn.Module) -> dict[str, UnshardedCollection]:
    """Every unsharded collection of ``model`` that is converted or can be, as converted, by each of its paths."""
    with unchanged(model), TableResizing(model) as resizing:
        discovery = discover(model)
        replacements = replace_collections(discovery.of(CONVERTIBLE), HashConfig(), "auto", resizing, keep_refused=True)
    collections: dict[str, UnshardedCollection] = {}
    for finding in discovery.findings:
        collection = replacements.get(id(finding.module), finding.module)
        if isinstance(collection, UnshardedCollection) and finding.status in (CONVERTIBLE, CONVERTED):
            collections |= dict.fromkeys(finding.paths, collection)
    return collections


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo side effects of looking: modes of ScriptModules, which are never copied, and empty optimizer state."""
    modes = [(module, module.training) for module in model.modules()]
    states = [
        (optimizer.state, weight)
        for weight in model.parameters()
        for optimizer in attached_optimizers(weight)
        if weight not in getattr(optimizer, "state", {weight})
    ]
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.training = training
        for state, weight in states:  # reading the defaultdict created an entry
            if weight in state and not state[weight]:
                del state[weight]


def _refuse_tied(
    owners: Mapping[int, tuple[str, TableSpec]], converted: UnshardedCollection, path: str
) -> dict[int, tuple[str, TableSpec]]:
    """Refuse tables of one weight if one of them has an index (``tied_tables``); ``owners`` with ``converted``'s
    tables: the first table of each weight, and the weight's name, by ``id`` of the weight.
    """
    more = {**owners}
    for spec in converted.tables:
        mine = kind_of(converted).weight_name(path, spec.name), spec
        name, other = more.setdefault(id(converted.weight(spec.name)), mine)
        if other is not spec and (spec.has_index or other.has_index):
            raise ConversionError(
                f"table {spec.name!r} shares its weight with {name}, and each index would give its rows to other ids.",
                reason="tied_tables",
                module_path=path,
                what_to_do="use one table for both features, or leave the ids of both dense.",
            )
    return more


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


def notes_on_tied(model: nn.Module) -> list[Diagnostic]:
    """What is worth saying about weights of tables with an index that other modules of ``model`` have too."""
    notes = []
    for path, collection in unsharded_collections(model).items():
        for spec in collection.tables:
            for name in collection.store.shared_weights.get(spec.name, ()) if spec.has_index else ():
                table = kind_of(collection).table_path(path, spec.name)
                message = f"{name} is the weight of {table}: what it computes is by row, and rows are not ids there."
                advice = "find the rows of ids with index(table).find(ids), and the ids of rows with its items()."
                notes.append(Diagnostic("rows_read_elsewhere", table, message, advice))
    return notes
