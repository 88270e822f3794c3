"""The versions of an exported file: what of its program follows a model that is trained on, and how a delta, which
holds what has changed of that, makes the next version of it.

Each version has a random name. A delta names the version that it makes, the one that it changes, and the file that the
chain began with. Nothing of a version is written to: the next one has tensors of its own where it differs, and shares
the others, so that whoever has begun to use a version ends with it.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pprint import pformat
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from recfx.errors import ExportError
from recfx.exporter.compare_outputs import ModelCall, run_model
from recfx.exporter.model_copies import fresh_copy
from recfx.exporter.model_file import Program
from recfx.exporter.state import is_users, not_in_collections
from recfx.models.attribute_reads import MISSING, AttributeReads, plain_attribute
from recfx.runtime.base import holds_hooks

_PROGRAM = "program.program."
"""Where the program is in the module of a TorchScript file."""


CHANGING = ("version", "chain", "number", "state", "collections")
"""The fields of a manifest that a version has of its own."""


def new_version(parent: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a manifest that say which version a file is: of a new chain, or the next one after ``parent``."""
    version = secrets.token_hex(16)
    if parent is None:
        return {"version": version, "chain": version, "number": 0}
    return {"version": version, "chain": parent["chain"], "number": parent["number"] + 1}


def followed_state(program: Program, call: ModelCall) -> dict[str, Any] | None:
    """What a manifest says of the tensors of a program: those that hold tables, by collection and filling; the paths in
    the model of the others; the names of those in ``lists``, of which torch's LSTM has one; and the ``unfollowed``,
    which the model has under no path. Also what the model's code ``reads``. None of a program of pt2.
    """
    if program.paths is None:
        return None
    tables, tensors, unfollowed, attributes = {}, {}, [], {}
    places, small = {}, set()
    for served in call.served.values():
        small |= {buffer.data_ptr() for buffer in served.graph_module.buffers()}
        for number, filling in enumerate(served.fillings):
            places[filling.buffer.data_ptr()] = served.path, number, filling
    model = fresh_copy(call.model)[0]
    held = program.attributes()
    plain_tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    named = {**program.buffers(), **program.parameters(), **plain_tensors}
    for name, tensor in named.items():
        if not tensor.numel():
            continue
        if tensor.data_ptr() in places:
            path, number, filling = places[tensor.data_ptr()]
            tables[name] = [path, number]
            if facts := filling.index_facts():
                attributes[name.rpartition(".")[0]] = facts
        elif tensor.data_ptr() not in small:
            first, dot, rest = name.partition(".")
            path = f"{program.paths.get(first, first)}{dot}{rest}"
            value = value_at(model, path)
            if value is None or not same_bits(value, tensor):
                unfollowed.append(name)
            tensors[name] = path
    lists, by_memory = {}, {(tensor.data_ptr(), tensor.shape): name for name, tensor in named.items()}
    for name in sorted(held.keys() - plain_tensors):
        inside = [part for part in tree_leaves(held[name]) if isinstance(part, torch.Tensor)]
        known = [by_memory[key] for part in inside if (key := (part.data_ptr(), part.shape)) in by_memory]
        if inside and isinstance(held[name], list) and len(known) == len(held[name]):
            lists[name] = known
        elif inside:
            unfollowed.append(name)
    return {
        "tables": tables, "tensors": tensors, "lists": lists, "unfollowed": unfollowed, "attributes": attributes,
        "reads": plain_reads(call),
    }  # fmt: skip


def plain_reads(call: ModelCall) -> dict[str, str]:
    """The plain attributes, such as numbers, that the user's modules read in the calls of an export, by path, as texts:
    a program has them for ever. What a call changes is left out: it says, as a rule, that a module is prepared.
    """
    model = fresh_copy(call.model)[0]
    modules = {path: module for path, module in not_in_collections(model) if is_users(type(module))}
    reads = AttributeReads(modules, plain_attribute)
    with reads.recorded():
        for sample in (call.sample, *call.other_calls.values()):
            run_model(model, sample)
    kept = [
        f"{path}.{name}" for (path, name), value in reads.values.items()
        if value == plain_attribute(modules[path], name) and not holds_hooks(name)
    ]  # fmt: skip
    return {where: _text_at(modules, where) for where in kept}


def changed_read(model: nn.Module, reads: Mapping[str, str]) -> str:
    """What has changed of ``plain_reads``, for people; empty if nothing has."""
    modules = dict(model.named_modules())
    for where, text in reads.items():
        if (now := _text_at(modules, where)) != text:
            return f"{where.lstrip('.')} = {now}, and {text} in the base"
    return ""


def _text_at(modules: Mapping[str, nn.Module], where: str) -> str:
    path, _, name = where.rpartition(".")
    value = plain_attribute(modules[path], name) if path in modules else MISSING
    text = "" if value is MISSING else pformat(value, sort_dicts=False)  # a set always has the same order there
    return text if len(text) <= 60 else hashlib.sha256(text.encode()).hexdigest()


def value_at(model: nn.Module, path: str) -> torch.Tensor | None:
    """The tensor that a model has at a path, where a parametrization may compute it; None if there is none."""
    try:
        with torch.no_grad():
            value = attrgetter(path)(model)
    except AttributeError:
        return None
    if not isinstance(value, torch.Tensor):
        return None
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of the same dtype, shape and bytes; NaN is equal to itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 ``[n]``: its own memory if it is contiguous."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def check_follows(delta: Mapping[str, Any], manifest: Mapping[str, Any], path: object) -> None:
    """Refuse a delta that does not change the version that ``manifest`` is of."""
    if "delta" not in delta:
        raise ExportError(
            f"{path} is a whole file, not a delta.", reason="not_a_delta", what_to_do="load it with recfx.load."
        )
    if "version" not in manifest or delta["chain"] != manifest["chain"]:
        raise ExportError(
            f"{path} belongs to the chain of another base, {delta['chain'][:8]}; this file is of "
            f"{manifest.get('chain', 'no chain')[:8]}.",
            reason="delta_of_other_base",
            what_to_do="load the base that the delta was made for, and apply its deltas in order.",
        )
    if delta["delta"]["parent"] != manifest["version"]:
        raise ExportError(
            f"{path} is delta {delta['number']} and follows version {delta['delta']['parent'][:8]}; this is version "
            f"{manifest['version'][:8]}, number {manifest['number']} of the chain.",
            reason="delta_out_of_order",
            what_to_do="apply each delta once, in the order of their numbers; where one is missing, load a newer base.",
        )


def next_version(script: Any, delta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """The module of a TorchScript file with the changes of a delta, whose tensors are given by name; the old module
    does not change, and shares with the new one what is equal.
    """
    changes = delta["delta"]
    old = partial(tensor_of_script, script)
    changed: dict[str, Any] = {name: tensors[data].to(old(name).device) for name, data in changes["tensors"].items()}
    for stretch in changes["stretches"]:
        name, begin, count, unit = (stretch[key] for key in ("tensor", "begin", "count", "unit"))
        if name not in changed:
            changed[name] = old(name).detach().clone(memory_format=torch.contiguous_format)
        units = changed[name].view(-1).view(torch.uint8)[begin : begin + count * unit].view(count, unit)
        which = tensors[stretch["which"]].long().to(units.device)
        units.index_copy_(0, which, tensors[stretch["data"]].to(units.device))
    for name, parts in changes["lists"].items():
        changed[name] = [changed[part] if part in changed else old(part) for part in parts]
    for module, facts in changes["attributes"].items():
        changed |= {f"{module}.{name}": value for name, value in facts.items()}
    made = _with(script._c, {_PROGRAM + name: value for name, value in changed.items()})
    return torch.jit._recursive.wrap_cpp_module(made)


def tensor_of_script(script: Any, name: str) -> torch.Tensor:
    """A tensor of the program of a TorchScript file: a parameter, a buffer, or an attribute."""
    tensor: torch.Tensor = attrgetter(name)(script.program.program)
    return tensor


def _with(module: Any, values: Mapping[str, Any]) -> Any:
    """A module with other values at some paths; it shares the other ones."""
    made, inside = copy.copy(module), dict[str, dict[str, Any]]()
    for path, value in values.items():
        first, _, rest = path.partition(".")
        if rest:
            inside.setdefault(first, {})[rest] = value
        else:
            made.setattr(first, value)
    for name, changes in inside.items():
        made.setattr(name, _with(module.getattr(name), changes))
    return made
