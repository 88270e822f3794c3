"""The model that a conversion is compared with: the original on its own copies of the converted model's tables."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.copy_modules import copy_modules, copy_with_tensors, standard_collection
from recfx.collections.kinds import POOLED, SEQUENCE, CollectionKind, kind_of
from recfx.collections.raw_ids import RawIdCollection
from recfx.discovery.sample import clone_value
from recfx.optim.attached import attached_classes, attached_optimizers, run_in_backward
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of

_Module = TypeVar("_Module", bound=nn.Module)


def map_collection(standard: Any, hashed: UnshardedCollection) -> None:
    """Let a standard collection, a copy of the one that was converted, take the ids of a hashed one, over copies of its
    tables. Its class becomes a subclass, and its parameters stay the same objects; so methods, attributes, hooks, the
    device and whatever else reads a table are those of the original.
    """
    standard.__dict__["hashed"] = hashed  # no child
    kind = kind_of(hashed)
    mapped_collection, mapped_table = _MAPPED[kind]
    setattr(standard, kind.configs_attribute, kind.configs_of(hashed))
    for table in hashed.tables:
        holder: Any = kind.tables_of(standard)[table.name]
        weight = hashed.weight(table.name)
        holder.num_embeddings = table.num_embeddings
        holder.weight.data = weight.detach().clone()
        holder.weight.requires_grad_(weight.requires_grad)
        if table.has_index:
            holder.reads_copies = table.admits and table.hashing is not None and table.hashing.unseen != "zeros"
            _mix_in(mapped_table, holder)
    _mix_in(mapped_collection, standard)


def _mix_in(mixin: type[_Module], module: _Module) -> None:
    kind = type(module)
    module.__class__ = mixin if kind in mixin.__bases__ else type(kind.__name__, (mixin, kind), {})


class _MappedTable(nn.Module):
    """A table with a row of zeros after its own, for ids without a row.

    With ``reads_copies``, a copy of all rows follows: an id that is not admitted reads one without training it.
    """

    reads_copies: bool

    def _rows(self: Any) -> torch.Tensor:
        rows = [self.weight, self.weight.new_zeros(1, self.embedding_dim)]
        return torch.cat([*rows, self.weight.detach()] if self.reads_copies else rows)


class MappedEmbedding(nn.Embedding, _MappedTable):
    """A table whose rows are not pooled."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input, self._rows())


class MappedBag(nn.EmbeddingBag, _MappedTable):
    """A table whose rows are pooled."""

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return nn.functional.embedding_bag(
            input,
            self._rows(),
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )


class _MappedCollection:
    """A standard collection that maps ids to rows; see :func:`map_collection`, which is the way to make one.

    It is the last base of its subclasses, so that objects of the standard class can become theirs.
    """

    hashed: UnshardedCollection

    def _mapped(self: Any, features: KeyedJaggedTensor, is_weighted: bool = False) -> tuple[Any, KeyedJaggedTensor]:
        """The collection as it reads one key for each of its outputs, and the rows for these keys."""
        features = maybe_td_to_kjt(features, None)
        by_feature = features.to_dict()
        strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        names, values, lengths, weights, key_strides = [], [], [], [], []
        for table in self.hashed.tables:
            names.append(list(table.embedding_names))  # one key per table, because each maps ids differently
            for feature in table.feature_names:
                jagged = by_feature[feature]
                values.append(self._map(table.name, jagged.values().to(torch.int64)))
                lengths.append(jagged.lengths())
                key_strides.append([strides[feature]])
                if is_weighted:
                    weights.append(jagged.weights())
        variable = features.variable_stride_per_key()
        mapped = KeyedJaggedTensor(
            [name for of_table in names for name in of_table],
            torch.cat(values),
            torch.cat(weights) if weights else None,
            lengths=torch.cat(lengths),
            stride=None if variable else features.stride(),
            stride_per_key_per_rank=key_strides if variable else None,
            inverse_indices=features.inverse_indices_or_none(),
        )
        renamed: Any = object.__new__(kind_of(self).standard)
        renamed.__dict__ = {**self.__dict__, "_feature_names": names}
        return renamed, mapped

    def _map(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        if table not in self.hashed.hash_indexes:
            return ids
        index: Any = self.hashed.hash_indexes[table]
        known_ids, rows = (part.to(ids.device) for part in index.items())
        if index.config.dense_rows:
            dense = (ids >= 0) & (ids < index.config.dense_rows)
        else:
            dense = torch.zeros_like(ids, dtype=torch.bool)
        if known_ids.numel():
            known_ids, order = known_ids.sort()
            place = torch.searchsorted(known_ids, ids).clamp(max=known_ids.numel() - 1)
            known, mapped = known_ids[place] == ids, rows[order[place]]
        else:
            known, mapped = torch.zeros_like(dense), torch.zeros_like(ids)
        absent = ~(known | dense)
        if bool(absent.any()):
            mapped[absent] = self._map_absent(index, ids[absent])
        return torch.where(dense, ids, mapped)

    def _map_absent(self, index: Any, ids: torch.Tensor) -> torch.Tensor:
        config, zeros = index.config, torch.full_like(ids, index.config.rows)
        unseen = index.shared_rows(ids) if config.unseen != "zeros" else zeros
        if not self.hashed.training:
            return unseen
        full = index.shared_rows(ids) if config.on_full == "share" else zeros
        if not config.admits:
            return full
        candidates, sightings = (part.to(ids.device) for part in index.candidates())
        admitted = torch.isin(ids, candidates[sightings >= config.admit_after])
        return torch.where(admitted, full, unseen + zeros + 1 if config.unseen != "zeros" else zeros)


class MappedCollection(EmbeddingBagCollection, _MappedCollection):
    """A pooled collection."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Map the ids of every feature, then pool as the standard collection does."""
        return EmbeddingBagCollection.forward(*self._mapped(features, self.is_weighted()))


class MappedSequences(EmbeddingCollection, _MappedCollection):
    """A collection whose rows are not pooled."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Map the ids of every feature, then look them up as the standard collection does; its indices are the ids."""
        output = EmbeddingCollection.forward(*self._mapped(features))
        if not self.need_indices():
            return output
        ids = maybe_td_to_kjt(features, None).to_dict()
        return {
            key: JaggedTensor(output[key].values(), ids[feature].values(), output[key].lengths())
            for table in self.hashed.tables
            for key, feature in zip(table.embedding_names, table.feature_names, strict=True)
        }


_MAPPED: dict[CollectionKind, tuple[type[nn.Module], type[nn.Module]]] = {
    POOLED: (MappedCollection, MappedBag),
    SEQUENCE: (MappedSequences, MappedEmbedding),
}
"""The classes of a collection and of its tables with an index, by kind."""


def reference_of(original: nn.Module, converted: nn.Module, training: bool) -> nn.Module:
    """A copy of ``original`` whose hashed collections take the ids of ``converted``, over copies of its tables.

    Managed collisions that have been taken over run as they are in eval mode, if ids that they do not know have the
    same answer; in training, they would not give rows to ids as the index does.
    """
    duplicate = copy_with_tensors(original)
    taken_over = {path: module for path, module in converted.named_modules() if isinstance(module, RawIdCollection)}
    run_as_they_are = set()
    in_front: dict[int, nn.Module] = {}
    for path, module in taken_over.items():
        managed: Any = duplicate.get_submodule(path)
        inside = module._embedding_module
        if not training and isinstance(inside, UnshardedCollection) and _answers_alike(managed, inside):
            run_as_they_are.add(id(inside))
        elif isinstance(managed, BaseManagedCollisionEmbeddingCollection):
            returns_rows = bool(managed._return_remapped_features)
            in_front[id(managed)] = RawIdCollection(managed._embedding_module, returns_rows).train(training)
    if in_front:
        duplicate, _ = copy_modules(duplicate, in_front)
    collections = unsharded_collections(duplicate).values()  # the original may have been converted in place
    standard = {
        id(collection): standard_collection(collection) for collection in collections if len(collection.hash_indexes)
    }
    if standard:
        duplicate, _ = copy_modules(duplicate, standard)
    for path, collection in unsharded_collections(converted).items():
        if len(collection.hash_indexes) and id(collection) not in run_as_they_are:
            map_collection(duplicate.get_submodule(path), collection)
    return duplicate


def answer_unknown_ids_otherwise(original: nn.Module, converted: nn.Module) -> list[str]:
    """The paths of managed collisions that have been taken over, and whose unknown ids read something else now."""
    return [
        path
        for path, module in converted.named_modules()
        if isinstance(module, RawIdCollection)
        and isinstance(module._embedding_module, UnshardedCollection)
        and isinstance(managed := original.get_submodule(path), BaseManagedCollisionEmbeddingCollection)
        and not _answers_alike(managed, module._embedding_module)
    ]


def learned_otherwise(original: nn.Module, converted: nn.Module) -> list[str]:
    """The tables whose managed collisions, which run as they are, know different ids or rows than the index now."""
    return [
        kind_of(module._embedding_module).table_path(f"{path}._embedding_module".removeprefix("."), table.name)
        for path, module in converted.named_modules()
        if isinstance(module, RawIdCollection)
        and isinstance(module._embedding_module, UnshardedCollection)
        and _answers_alike(managed := original.get_submodule(path), module._embedding_module)
        for table in module._embedding_module.tables
        if not module.knows_ids_of(managed._managed_collision_collection, table.name)
    ]


def _answers_alike(managed: Any, converted: UnshardedCollection) -> bool:
    """Whether ids that managed collisions do not know read the same row in the converted collection."""
    if not isinstance(managed, BaseManagedCollisionEmbeddingCollection):
        return False
    modules: Any = managed._managed_collision_collection._managed_collision_modules
    return all(
        isinstance(modules[table.name], MCHManagedCollisionModule)
        and modules[table.name].output_size() == table.num_embeddings
        and table.hashing is not None
        and table.hashing.unseen == "row"
        for table in converted.tables
    )


def attach_optimizers(source: nn.Module, duplicate: nn.Module, skip: set[str]) -> None:
    """Give the parameters of ``duplicate`` the optimizers in backward that are attached to those of ``source``.

    Copying a parameter loses them. Settings and state are copied; parameters named in ``skip`` are left alone.
    """
    parameters: dict[str, Any] = dict(duplicate.named_parameters())
    parameter: Any
    for name, parameter in source.named_parameters():
        optimizers = attached_optimizers(parameter)
        if not optimizers or name in skip:
            continue
        target = parameters[name]
        fused = fused_optimizer_of(parameter, name)
        if isinstance(fused, FusedOptimizer) and not hasattr(optimizers[0], "param_groups"):
            _attach_dense(fused, target)  # one of TorchRec's placeholders, whose step() only raises
            continue
        for optimizer_class, settings in attached_classes(parameter):
            run_in_backward(optimizer_class, target, dict(settings))
        for ours, theirs in zip(attached_optimizers(target), optimizers, strict=True):
            _copy_optimizer(theirs, ours, parameter, target)


def copy_fused_state(hashed: nn.Module, reference: nn.Module) -> None:
    """Give the optimizers in backward of ``reference`` the state of the fused ones of ``hashed``.

    Hashing a batch resets the state of rows that go to new ids, so the state of the original model would be wrong.
    """
    for path, collection in unsharded_collections(hashed).items():
        for table, fused in collection.fused_optimizers().items():
            weight: Any = reference.get_parameter(kind_of(collection).weight_name(path, table))
            for optimizer in attached_optimizers(weight):
                if fused.state and hasattr(optimizer, "state"):
                    optimizer.state[weight] = {key: clone_value(value) for key, value in fused.state.items()}


def _attach_dense(fused: FusedOptimizer, target: nn.Parameter) -> None:
    settings = {key: fused.group[key] for key in fused.rule.supported if key in fused.group}
    run_in_backward(fused.rule.dense_class, target, settings)
    (optimizer,) = attached_optimizers(target)
    optimizer.state[target].update({key: clone_value(value) for key, value in fused.state.items()})


def _copy_optimizer(source: Any, duplicate: Any, parameter: nn.Parameter, target: nn.Parameter) -> None:
    if not hasattr(source, "param_groups"):  # a placeholder that no rule stands for
        return
    for key, value in source.param_groups[0].items():
        if key != "params":
            duplicate.param_groups[0][key] = value
    state = {key: clone_value(value) for key, value in source.state.get(parameter, {}).items()}
    if state:
        duplicate.state[target] = state
