"""Managed collisions of TorchRec's: which collections can be taken over, and a model in which they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from recfx.collections.copy_modules import attributes, carry_hooks, copy_modules
from recfx.collections.kinds import standard_kind
from recfx.collections.raw_ids import RawIdCollection, rows_of_sharded
from recfx.errors import ConversionError, Diagnostic, Severity, few
from recfx.hashing import HashConfig, ResolvedHashConfig
from recfx.hashing.learned_maps import LearnedMap
from recfx.models.classify import CONVERTIBLE, REFUSED, Finding, classify
from recfx.models.discover import Discovery
from recfx.runtime.base import has_forward_hooks
from recfx.versions.differences import HashZchManagedCollisionModule, PECEmbeddingCollection

_COLLECTIONS = (ManagedCollisionEmbeddingCollection, ManagedCollisionEmbeddingBagCollection)
_OTHERS = (ITEPEmbeddingBagCollection, ITEPEmbeddingCollection, PECEmbeddingCollection)
_POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)
_EMPTY = torch.iinfo(torch.int64).max  # of MCH, in the place of an id


@dataclass
class TakenOver:
    """A model without the managed collisions that can be taken over."""

    model: nn.Module  # in which ``RawIdCollection`` have taken their places; the same object if there are none
    learned: dict[int, dict[str, LearnedMap]] = field(default_factory=dict)  # by ``id`` of the inner one, and by table
    places: dict[str, int] = field(default_factory=dict)  # the ``id`` of each that was taken over, by each of its paths
    refused: dict[int, tuple[nn.Module, Diagnostic]] = field(default_factory=dict)  # the others, by ``id``

    def mark(self, discovery: Discovery) -> None:
        """Refuse what was not taken over, and collections inside that are called with rows elsewhere."""
        discovered = {id(finding.module) for finding in discovery.findings}
        for key, (module, why) in self.refused.items():
            if key not in discovered:  # the model is searched inside of these
                discovery.findings.append(Finding(module, [why.path], REFUSED, why))
        for finding in discovery.findings:
            if id(finding.module) in self.refused:
                finding.refuse(self.refused[id(finding.module)][1])
            elif id(finding.module) in self.learned:
                finding.learned = self.learned[id(finding.module)]
            if finding.learned and (elsewhere := [path for path in finding.paths if not _is_inside(path, self.places)]):
                what = f"the collection inside is also {elsewhere[0]!r}, where its ids are rows"
                what_to_do = "call it only through the managed-collision collection"
                finding.refuse(_refused("managed_collision_layout", what, what_to_do, "").diagnostic)

    def notes(self, discovery: Discovery, replacements: Mapping[int, nn.Module]) -> list[Diagnostic]:
        """What the report says of each table; ``replacements`` are the converted collections, by ``id``."""
        notes = []
        for finding in discovery.of(CONVERTIBLE):
            converted: Any = replacements[id(finding.module)]
            alike: dict[tuple[str, str, Severity], dict[str, int]] = {}  # learned ids by table, by what is said of them
            for table, learned in self.learned.get(id(finding.module), {}).items():
                how = _about_training(learned, converted.index(table).config)
                alike.setdefault(how, {})[table] = learned.ids.numel()
            for (message, what_to_do, severity), tables in alike.items():
                names = f"table{'s' * (len(tables) > 1)} {few(list(tables), 6)}"
                message = f"{sum(tables.values()):,} learned ids of {names} keep their rows. {message}"
                if what_to_do:
                    keep = "to keep the rules of TorchRec's module, pass as hashing= a dict by table name that leaves"
                    what_to_do = f"{keep} {names} out; {what_to_do}"
                notes.append(Diagnostic("managed_collision_converted", finding.path, message, what_to_do, severity))
        return notes


def _about_training(learned: LearnedMap, config: ResolvedHashConfig) -> tuple[str, str, Severity]:
    """How training goes on differently, what to do about it, and how much that matters."""
    rules = learned.differing_rules(config)
    message = (
        f"Training goes on differently: by recfx.{learned.config}, unless hashing= says otherwise. A new id gets a "
        "row, with initial weights, in its first batch. What TorchRec's module has besides (filters and chances of "
        "admission, decay, expiry after hours, fallback slots, ids that wait for an interval) has no counterpart; "
        "HashConfig(admit_after=) counts sightings, and HashConfig(on_full='evict', evict='ttl', ttl_batches=) lets "
        "ids expire."
    )
    if not rules:
        return message, "", Severity.INFO
    message += f" The rules given in hashing= also differ from those of TorchRec's module: {'; '.join(rules)}."
    reads = config.unseen != learned.config.unseen
    message += " In eval mode, ids that were not learned do not read what they read before." if reads else ""
    what_to_do = f"to change only some of them, begin with recfx.{learned.config}, which comes closest to them all."
    return message, what_to_do, Severity.WARNING if reads else Severity.INFO


def take_over(model: nn.Module, *, shards: bool) -> TakenOver:
    """Make a model in which the managed-collision collections of ``model`` are ``RawIdCollection``; changes nothing."""
    taken = TakenOver(model)
    replacements: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (BaseManagedCollisionEmbeddingCollection, *_OTHERS)):
            if standard_kind(module) is not None:
                replacements.setdefault(id(module), module)  # found in `model` itself, whose objects are replaced
            continue
        replacements[id(module)] = module
        try:
            learned = _learned(module, path, shards)
        except ConversionError as error:
            taken.refused[id(module)] = module, error.diagnostic
            continue
        inner: Any = module._embedding_module
        in_front = RawIdCollection(inner, bool(module._return_remapped_features)).train(module.training)
        carry_hooks(module, in_front)
        in_front.__dict__.update(
            {name: value for name, value in attributes(module) if not name.startswith("_") and name != "training"}
        )
        replacements[id(module)] = in_front
        taken.learned[id(inner)] = learned
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(replacements.get(id(module)), RawIdCollection):
            taken.places[path] = id(module)
    if taken.places:
        taken.model, _ = copy_modules(model, replacements)
    return taken


def _learned(module: Any, path: str, shards: bool) -> dict[str, LearnedMap]:
    """What the modules of a collection have learned, by table, or the error that says why that cannot be taken over."""
    if type(module) not in _COLLECTIONS or "forward" in module.__dict__:
        raise _own_code(module, path)
    remapping, inner = module._managed_collision_collection, module._embedding_module
    is_hooked = any(map(has_forward_hooks, remapping.modules()))
    if type(remapping) is not ManagedCollisionCollection or "forward" in remapping.__dict__ or is_hooked:
        raise _own_code(remapping, path)
    if any(part.training != module.training for part in remapping.modules()):
        what, what_to_do = "what remaps the ids is in another mode than the rest", "set the mode of all of it"
        raise _refused("managed_collision_layout", what, f"{what_to_do}; what stays frozen is not converted", path)
    finding = classify(inner, f"{path}.{_INNER}" if path else _INNER)
    if finding is None or finding.status != CONVERTIBLE:
        why = finding.why if finding is not None and finding.why is not None else _own_code(inner, path).diagnostic
        raise ConversionError.of(why)
    if any(weight.is_meta for weight in inner.parameters()):
        raise _refused("managed_collision_on_meta", *_ON_META, path)
    if module._return_remapped_features and shards:
        raise rows_of_sharded(path)
    configs, modules = list(remapping.embedding_configs()), remapping._managed_collision_modules
    if list(modules) != [config.name for config in configs] or len(set(map(id, modules.values()))) < len(modules):
        raise _misplaced("its modules are not one per table, in the order of the tables", path)
    for config in configs:
        if getattr(config, "enable_embedding_update", False):
            what = f"table {config.name!r} has enable_embedding_update, by which others write its rows"
            raise _refused("embedding_update", what, "leave it out", path)
        suffix = getattr(modules[config.name], "_read_only_suffix", None)
        if suffix and any(name.lower().endswith(suffix) for name in (config.name, *config.feature_names)):
            what = f"table {config.name!r} or one of its features ends with {suffix!r}, so it learns no ids in training"
            raise _refused("managed_collision_code", what, _KEEP, path)
    learned = {name: _learned_by(remap, name, path) for name, remap in modules.items()}
    remapped_for: dict[str, str] = {}  # table by feature; TorchRec looks the rows of the last one up in all of them
    for config in configs:
        for feature in config.feature_names:
            other = remapped_for.setdefault(feature, config.name)
            if not learned[config.name].reads_as(learned[other]):
                raise _misplaced(f"feature {feature!r} is remapped for tables that have learned different rows", path)
    return learned


_INNER = "_embedding_module"


def _learned_by(module: Any, table: str, path: str) -> LearnedMap:
    reader: Any = _READERS.get(type(module))
    if reader is None or {"forward", "remap", "preprocess", "profile"} & module.__dict__.keys():
        raise _own_code(module, path)
    _refuse_what_is_lost(module, f"the module of table {table!r}", path)
    learned = reader(module)
    if not learned.is_whole:
        what = f"the module of table {table!r} has given a row to two ids, or one that the table has not"
        raise _refused("managed_collision_damaged", what, "load a state of the module that is whole", path)
    return learned


def _refuse_what_is_lost(module: Any, name: str, path: str) -> None:
    """Refuse a module whose map does not tell all that it does with ids."""
    is_mch = isinstance(module, MCHManagedCollisionModule)
    identities = module._mch_sorted_raw_ids if is_mch else module._hash_zch_identities
    if identities.is_meta:
        raise _refused("managed_collision_on_meta", f"{name} {_ON_META[0]}", _ON_META[1], path)
    if module._output_global_offset if is_mch else module._output_global_offset_tensor:
        what = f"{name} is a part of a sharded one"
        raise _refused("managed_collision_part", what, "convert the model before it is sharded", path)
    if is_mch and type(module._eviction_policy) not in _POLICIES:
        what = f"{name} evicts by {type(module._eviction_policy).__name__}"
        raise _refused("managed_collision_code", what, _KEEP, path)
    if is_mch and module._input_hash_func is not None:
        what_to_do = "apply the function to the ids before the collection, and leave it out of the module"
        what = f"{name} has an input_hash_func, so that it knows hashed ids alone"
        raise _refused("managed_collision_hash", what, what_to_do, path)
    if not is_mch and module.input_mapper._inference_dispatch_div_train_world_size:
        what = f"{name} divides ids before it looks them up, so that it knows parts of them"
        raise _refused("managed_collision_hash", what, _KEEP, path)


_ON_META = "is on the meta device, where nothing is learned", "load its state first"
_KEEP = "keep it with on_unsupported='keep'"


def _own_code(module: nn.Module, path: str) -> ConversionError:
    message = f"{type(module).__name__} remaps ids in a way that recfx does not know"
    return _refused("managed_collision_code", message, _KEEP, path)


def _misplaced(message: str, path: str) -> ConversionError:
    what_to_do = "give each table features and a module of its own, in the order of the tables"
    return _refused("managed_collision_layout", message, what_to_do, path)


def _refused(reason: str, message: str, what_to_do: str, path: str) -> ConversionError:
    return ConversionError.of(Diagnostic(reason, path, f"{message}.", f"{what_to_do}.", Severity.ERROR))


def _is_inside(path: str, places: dict[str, int]) -> bool:
    return any(path == (f"{place}.{_INNER}" if place else _INNER) for place in places)


def _learned_by_mch(module: MCHManagedCollisionModule) -> LearnedMap:
    """The map of a sorted list of ids."""
    map_module: Any = module
    ids, rows = map_module._mch_sorted_raw_ids[:-1].cpu(), map_module._mch_remapped_ids_mapping[:-1].cpu()
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]  # only the first of equal ids is ever found
    known = torch.nonzero((ids != _EMPTY) & is_first).squeeze(1)
    policy = module._eviction_policy
    counts, last = (
        torch.zeros_like(known) if (noted := map_module._buffers.get(name)) is None else noted.cpu()[known]
        for name in ("_mch_counts", "_mch_last_access_iter")
    )
    batches = max(int(map_module._current_iter_tensor), int(last.max()) if last.numel() else 0)
    rule: Literal["lru", "lfu"] = "lru" if isinstance(policy, LRU_EvictionPolicy) else "lfu"
    return LearnedMap(
        rows=module._zch_size,
        ids=ids[known],
        rows_of_ids=rows[known],
        config=HashConfig.raw_ids(buckets=1, on_full="evict", evict=rule, unseen="row"),
        last_batches=last,
        counts_batches=isinstance(policy, LRU_EvictionPolicy | DistanceLFU_EvictionPolicy),
        sightings=counts,
        batches=batches,
        misses=True,
    )


def _learned_by_hash_zch(module: HashZchManagedCollisionModule) -> LearnedMap:
    """The map of a table of slots, of which each is a row."""
    identities = module._hash_zch_identities.detach().cpu().view(-1)
    rows = torch.nonzero(identities != -1).squeeze(1)
    policy, metadata = module._eviction_policy_name, module._hash_zch_metadata
    batches, last = 0, torch.zeros_like(rows)
    if policy is not None and metadata is not None and rows.numel():  # hours: only their order counts
        _, last = torch.unique(metadata.cpu().view(-1)[rows], return_inverse=True)
        batches = int(last.max())
    full: Any = "evict" if policy is not None else "error" if module._disable_fallback else "share"
    return LearnedMap(
        rows=module._zch_size, ids=identities[rows], rows_of_ids=rows,
        config=HashConfig.raw_ids(buckets=1, on_full=full), last_batches=last, counts_batches=False,
        sightings=torch.zeros_like(rows), batches=batches, misses=False,
    )  # fmt: skip


_READERS = {MCHManagedCollisionModule: _learned_by_mch, HashZchManagedCollisionModule: _learned_by_hash_zch}
