"""What a model's collections would become, to look at; the model stays as it is, and no table is allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.discovery.classify import CONVERTED, CONVERTIBLE
from recfx.discovery.discover import Discovery, discover
from recfx.hashing import HashConfig
from recfx.optim.attached import attached_optimizers
from recfx.replacement.replace_collections import replace_collections
from recfx.replacement.resize_tables import TableResizing


def as_converted(model: nn.Module) -> dict[str, UnshardedCollection]:
    """Every unsharded collection of ``model`` that is converted or can be, as converted, by each of its paths."""
    with unchanged(model):
        return converted_by_path(model, discover(model))


def converted_by_path(model: nn.Module, discovery: Discovery) -> dict[str, UnshardedCollection]:
    """Convert copies of what was found; collections whose tables cannot be converted are refused in ``discovery``."""
    with TableResizing(model) as resizing:
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
