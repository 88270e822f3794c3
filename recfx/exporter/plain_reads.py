"""Plain attributes, such as numbers, that the code of a model reads: a program has their values for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pprint import pformat
from typing import Any

from torch import nn

from recfx.exporter.compare_outputs import ModelCall, run_model
from recfx.exporter.model_copies import fresh_copy
from recfx.exporter.state import is_users, not_in_collections
from recfx.models.attribute_reads import MISSING, AttributeReads, plain_attribute
from recfx.runtime.base import holds_hooks

_SHOWN = 60
"""Longer texts are told by their hashes."""


def plain_reads(call: ModelCall) -> dict[str, str]:
    """What the user's modules read in the calls of an export, by path, as texts. What a call changes is left out: it
    says, as a rule, that a module has prepared itself.
    """
    model = fresh_copy(call.model)[0]
    modules = {path: module for path, module in not_in_collections(model) if is_users(type(module))}
    reads = AttributeReads(modules, _plain)
    with reads.recorded():
        for sample in (call.sample, *call.other_calls.values()):
            run_model(model, sample)
    texts = {(path, name): _text(value) for (path, name), value in reads.values.items()}
    return {
        f"{path}.{name}": text for (path, name), text in texts.items() if text == _text(_plain(modules[path], name))
    }


def changed_read(model: nn.Module, reads: Mapping[str, str]) -> str:
    """What has changed of ``plain_reads``, for people; empty if nothing has."""
    modules = dict(model.named_modules())
    for where, before in reads.items():
        path, _, name = where.rpartition(".")
        now = _text(_plain(modules[path], name)) if path in modules else "nothing"
        if now != before:
            return f"{where.lstrip('.')} = {now}, and {before} in the base"
    return ""


def _plain(module: nn.Module, name: str) -> Any:
    return MISSING if holds_hooks(name) else plain_attribute(module, name)


def _text(value: Any) -> str:
    text = "nothing" if value is MISSING else pformat(value, sort_dicts=False)  # of a set, always in the same order
    return text if len(text) <= _SHOWN else hashlib.sha256(text.encode()).hexdigest()
