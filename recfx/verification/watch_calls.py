"""Hooks that record what the collections of a model do in one step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import CollectionKind, kind_of, standard_kind
from recfx.runtime import SelectFeatures
from recfx.verification.run import Run


@contextlib.contextmanager
def counted_calls(model: nn.Module, originals: Mapping[str, nn.Module], run: Run) -> Iterator[None]:
    """Count the calls of collections by what runs inside them: ``forward`` may be called without their hooks."""
    watched = {id(module): (path, module) for path, module in originals.items()}
    watched |= {id(module): (path, module) for path, module in model.named_modules()}
    own = {id(module) for module in model.modules()}
    handles = []
    for key, (path, module) in watched.items():
        if isinstance(module, UnshardedCollection):
            module.fused_optimizers()  # a newly attached one makes a new graph, which the hook must see
            parts: list[nn.Module] = [
                part for part in module.graph_module.modules() if isinstance(part, SelectFeatures)
            ]
            hook = partial(_note_call, run, path, key in own)
        elif (kind := standard_kind(module)) is not None and len(kind.tables_of(module)):
            parts = [next(iter(kind.tables_of(module).values()))]
            features = len(kind.configs_of(module)[0].feature_names)
            hook = partial(_note_table_call, run, path, key in own, [0], features, kind.call_arguments)
        else:
            continue
        run.calls.setdefault(path, 0)
        handles += [part.register_forward_pre_hook(hook, with_kwargs=True) for part in parts[:1]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_call(run: Run, path: str, own: bool, part: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
    run.calls[path] += 1
    if not own:
        run.originals.add(path)


def _note_table_call(
    run: Run,
    path: str,
    own: bool,
    seen: list[int],
    features: int,
    arguments: frozenset[str],
    table: nn.Module,
    inputs: Any,
    named: dict[str, Any],
) -> None:
    """Count calls that the standard forward makes: it calls a table once per feature, and names all ``arguments``.

    The user's own code may also call the table, but is unlikely to name all of them.
    """
    if not inputs and named.keys() == arguments:
        seen[0] += 1
        if seen[0] % features == 0:
            _note_call(run, path, own, table, inputs, named)


@contextlib.contextmanager
def noted_lookups(model: nn.Module, run: Run) -> Iterator[None]:
    """Record in ``run`` what every collection pools, and which rows standard ones read."""
    handles: list[Any] = []
    for path, module in model.named_modules():
        converted, kind = isinstance(module, ConvertedCollection), standard_kind(module)
        if isinstance(module, UnshardedCollection) or (kind is not None and not converted):
            # Before the hooks of the user, which may return something else.
            handles.append(
                module.register_forward_hook(partial(_note_outputs, run, path, kind_of(module)), prepend=True)
            )
        # A converted subclass is an instance of both.
        if kind is not None and not converted:
            for table, bag in kind.tables_of(module).items():
                hook = partial(_note_rows, run, kind.weight_name(path, table))
                handles.append(bag.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_outputs(run: Run, path: str, kind: CollectionKind, module: nn.Module, inputs: Any, output: Any) -> None:
    for key, value in kind.values_of(output).items():
        run.pooled[path, key] = value.detach().clone()


def _note_rows(run: Run, name: str, table: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
    rows = (named["input"] if "input" in named else inputs[0]).detach().to(torch.int64)
    seen = run.touched.get(name)
    run.touched[name] = torch.unique(rows if seen is None else torch.cat([seen, rows]))
