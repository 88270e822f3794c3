"""The model that a conversion is compared with: the original on its own copies of the converted model's tables."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.copy_modules import carry_hooks, copy_modules, copy_with_tensors, standard_collection
from recfx.collections.kinds import SEQUENCE, kind_of
from recfx.collections.raw_ids import RawIdCollection
from recfx.models.sample import clone_value
from recfx.optim.attached import attached_classes, attached_optimizers, run_in_backward
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of


def map_collection(standard: Any, hashed: UnshardedCollection) -> None:
    """Let a standard collection, a copy of the one that was converted, take the ids of a hashed one, over copies of its
    tables. Its parameters stay the same objects; methods, attributes, hooks and the device are those of the original.
    """
    kind = kind_of(hashed)
    setattr(standard, kind.configs_attribute, kind.configs_of(hashed))
    for table in hashed.tables:
        holder: Any = kind.tables_of(standard)[table.name]
        weight = hashed.weight(table.name)
        holder.num_embeddings = table.num_embeddings
        holder.weight.data = weight.detach().clone()
        holder.weight.requires_grad_(weight.requires_grad)
        if table.has_index:
            reads_copies = table.admits and table.hashing is not None and table.hashing.unseen != "zeros"
            holder.__dict__["forward"] = partial(_look_up, weakref.ref(holder), reads_copies)
    # Each table maps the ids of a feature differently, so the collection reads one key for each of its outputs.
    standard._feature_names = [list(table.embedding_names) for table in hashed.tables]
    standard.__dict__["hashed"] = hashed  # no child
    standard.__dict__["forward"] = partial(_answer, weakref.ref(standard))


def _look_up(
    of: Callable[[], Any],
    reads_copies: bool,
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a table answers that has a row of zeros after its own, for ids without a row; with ``reads_copies``, then a
    copy of all rows: an id that is not admitted reads one without training it.
    """
    table = of()
    parts = [table.weight, table.weight.new_zeros(1, table.embedding_dim)]
    rows = torch.cat([*parts, table.weight.detach()] if reads_copies else parts)
    if isinstance(table, nn.Embedding):
        return nn.functional.embedding(input, rows)
    return nn.functional.embedding_bag(
        input, rows, offsets, mode=table.mode, per_sample_weights=per_sample_weights,
        include_last_offset=table.include_last_offset,
    )  # fmt: skip


def _answer(of: Callable[[], Any], features: KeyedJaggedTensor) -> Any:
    """What the standard collection answers to the rows of the ids; its indices are the ids."""
    standard = of()
    hashed, kind = standard.hashed, kind_of(standard)
    features = maybe_td_to_kjt(features, None)
    output = kind.standard.forward(standard, _rows_of(features, hashed))
    if kind is not SEQUENCE or not standard.need_indices():
        return output
    ids = features.to_dict()
    return {
        key: JaggedTensor(output[key].values(), ids[feature].values(), output[key].lengths())
        for table in hashed.tables
        for key, feature in zip(table.embedding_names, table.feature_names, strict=True)
    }


def _rows_of(features: KeyedJaggedTensor, hashed: UnshardedCollection) -> KeyedJaggedTensor:
    """The rows for each key of the output."""
    by_feature = features.to_dict()
    strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    read = [(table, feature) for table in hashed.tables for feature in table.feature_names]
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        [name for table in hashed.tables for name in table.embedding_names],
        torch.cat([_map(hashed, table.name, by_feature[name].values().to(torch.int64)) for table, name in read]),
        torch.cat([by_feature[name].weights() for _, name in read]) if hashed.is_weighted() else None,
        lengths=torch.cat([by_feature[name].lengths() for _, name in read]),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=[[strides[name]] for _, name in read] if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )  # fmt: skip


def _map(hashed: UnshardedCollection, table: str, ids: torch.Tensor) -> torch.Tensor:
    if table not in hashed.hash_indexes:
        return ids
    index: Any = hashed.hash_indexes[table]
    known, rows_of_known = index.items()  # the oracle knows only the listing
    known, order = known.sort()
    rows = listed_rows(ids, known, rows_of_known[order], index.config.dense_rows)
    absent = rows < 0
    if bool(absent.any()):
        rows[absent] = _map_absent(index, ids[absent], hashed.training)
    return rows


def listed_rows(ids: torch.Tensor, known: torch.Tensor, rows: torch.Tensor, dense_rows: int) -> torch.Tensor:
    """The rows of ids, int64 ``[n]``, by a listing in the order of its ids; -1 for those that it does not have."""
    answer = torch.where((ids >= 0) & (ids < dense_rows), ids, -1)
    if not known.numel():
        return answer
    known, rows = known.to(ids.device), rows.to(ids.device)
    place = torch.searchsorted(known, ids).clamp_(max=known.numel() - 1)
    return torch.where((known[place] == ids) & (answer < 0), rows[place], answer)


def _map_absent(index: Any, ids: torch.Tensor, training: bool) -> torch.Tensor:
    config, zeros = index.config, torch.full_like(ids, index.config.rows)
    unseen = index.shared_rows(ids) if config.unseen != "zeros" else zeros
    if not training:
        return unseen
    full = index.shared_rows(ids) if config.on_full == "share" else zeros
    if not config.admits:
        return full
    candidates, sightings = (part.to(ids.device) for part in index.candidates())
    admitted = torch.isin(ids, candidates[sightings >= config.admit_after])
    return torch.where(admitted, full, unseen + zeros + 1 if config.unseen != "zeros" else zeros)


def reference_of(original: nn.Module, converted: nn.Module) -> nn.Module:
    """A copy of ``original`` whose hashed collections, and those in managed collisions that were taken over, take the
    ids of ``converted``, over copies of its tables.
    """
    duplicate = copy_with_tensors(original)
    replacements: dict[int, nn.Module] = {}
    for path, module in converted.named_modules():
        managed: Any = duplicate.get_submodule(path) if isinstance(module, RawIdCollection) else None
        if isinstance(managed, BaseManagedCollisionEmbeddingCollection):
            in_front = RawIdCollection(managed._embedding_module, bool(managed._return_remapped_features))
            carry_hooks(managed, in_front)
            replacements[id(managed)] = in_front.train(managed.training)
    for collection in unsharded_collections(duplicate).values():  # the original may have been converted in place
        if len(collection.hash_indexes):
            replacements[id(collection)] = standard_collection(collection)
    if replacements:
        duplicate, _ = copy_modules(duplicate, replacements)
    for path, collection in unsharded_collections(converted).items():
        if len(collection.hash_indexes):
            map_collection(duplicate.get_submodule(path), collection)
    return duplicate


def attach_optimizers(source: nn.Module, duplicate: nn.Module, skip: set[str]) -> None:
    """Give the parameters of ``duplicate``, except ``skip``, copies of the optimizers in backward of ``source``."""
    parameters: dict[str, Any] = dict(duplicate.named_parameters())
    parameter: Any
    for name, parameter in source.named_parameters():
        optimizers = attached_optimizers(parameter)
        if not optimizers or name in skip:
            continue
        target, fused = parameters[name], fused_optimizer_of(parameter, name)
        if isinstance(fused, FusedOptimizer) and not hasattr(optimizers[0], "param_groups"):
            # One of TorchRec's placeholders, whose step() only raises.
            settings = {key: fused.group[key] for key in fused.rule.supported if key in fused.group}
            run_in_backward(fused.rule.dense_class, target, settings)
            _copy_state(fused.state, attached_optimizers(target)[0], target)
            continue
        for optimizer_class, arguments in attached_classes(parameter):
            run_in_backward(optimizer_class, target, dict(arguments))
        ours: Any
        for ours, theirs in zip(attached_optimizers(target), optimizers, strict=True):
            if hasattr(theirs, "param_groups"):  # no placeholder that no rule stands for
                group = {key: value for key, value in theirs.param_groups[0].items() if key != "params"}
                ours.param_groups[0].update(group)
                _copy_state(theirs.state.get(parameter, {}), ours, target)


def copy_fused_state(hashed: nn.Module, reference: nn.Module) -> None:
    """Give the optimizers in backward of ``reference`` the state of ``hashed``'s fused ones: hashing a batch resets the
    state of rows that go to new ids.
    """
    for path, collection in unsharded_collections(hashed).items():
        for table, fused in collection.fused_optimizers().items():
            weight: Any = reference.get_parameter(kind_of(collection).weight_name(path, table))
            for optimizer in attached_optimizers(weight):
                if hasattr(optimizer, "state"):
                    _copy_state(fused.state, optimizer, weight)


def _copy_state(state: Mapping[str, Any], optimizer: Any, target: nn.Parameter) -> None:
    if state:
        optimizer.state[target] = {key: clone_value(value) for key, value in state.items()}
