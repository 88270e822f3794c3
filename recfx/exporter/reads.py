"""What the model's own code reads of its arguments, besides what it asks for by name.

The model runs once with arguments that record it. Programs of ``torch.export`` take KJTs apart into the sample's
features, and files of every format rebuild dicts in the sample's order, so both matter where they are read as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.discovery.nests import nest_of
from recfx.discovery.sample import Sample
from recfx.exporter.arguments import Signature
from recfx.exporter.compare_outputs import run_as_is
from recfx.exporter.model_copies import fresh_copy

_BY_NAME = frozenset({"__class__", "device", "inverse_indices_or_none", "stride", "variable_stride_per_key"})
"""What is the same for a KJT with other features besides; and files refuse those with inverse indices or strides."""


def read_as_a_whole(
    model: nn.Module, collections: Iterable[nn.Module], sample: Sample, signature: Signature
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the KJTs of which the model reads more than features by name, and the paths of the dicts over which
    it iterates. If the model does not take the arguments that record this, all of them.
    """
    reads: set[str] = set()
    copy, copies = fresh_copy(model)
    for collection in collections:
        _unwatch(copies[id(collection)])
    sample = sample.clone()
    leaves = signature.flatten(sample.args, sample.kwargs)
    names = [leaf.name if leaf.kind == "kjt" else "" for leaf in signature.leaves()]
    call = signature.call_of(
        [_kjt(leaf, name, reads) if name else leaf for leaf, name in zip(leaves, names, strict=True)]
    )
    dicts: list[str] = []
    values = [*call.args, *call.kwargs.values()]
    values = [_nest(value, name, reads, dicts) for name, value in zip(signature.parameters, values, strict=True)]
    keywords = zip(call.kwargs, values[len(call.args) :], strict=True)
    try:
        run_as_is(copy, Sample(*values[: len(call.args)], **dict(keywords)))
    except Exception:  # whatever the user's code raises
        reads |= {*names, *dicts}
    return tuple(name for name in names if name in reads and name), tuple(path for path in dicts if path in reads)


def _nest(value: Any, path: str, reads: set[str], dicts: list[str]) -> Any:
    nest = None if isinstance(value, KeyedJaggedTensor) else nest_of(value)
    if nest is None:
        return value
    items = [_nest(item, f"{path}.{key}", reads, dicts) for key, item in nest.items.items()]
    if nest.kind != "dict":
        return nest.make(items)
    dicts.append(path)
    return _dict(dict(zip(nest.items, items, strict=True)), path, reads)


def _dict(content: dict[str, Any], path: str, reads: set[str]) -> dict[str, Any]:
    """A dict that adds its path to ``reads`` if somebody iterates over it."""

    def recorded(name: str) -> Any:
        def method(self: Any, *args: Any) -> Any:
            reads.add(path)
            return getattr(dict, name)(self, *args)

        return method

    names = ("__iter__", "__reversed__", "__or__", "__ror__", "copy", "items", "keys", "popitem", "values")
    return type("Dict", (dict,), {name: recorded(name) for name in names})(content)


class _Watched(KeyedJaggedTensor):
    pass


def _kjt(batch: KeyedJaggedTensor, name: str, reads: set[str]) -> KeyedJaggedTensor:
    """A batch that adds its name to ``reads`` if somebody reads more of it than features by name."""

    class Watched(_Watched):
        def __getattribute__(self, attribute: str) -> Any:
            if attribute in _BY_NAME:
                return getattr(_plain(self), attribute)
            if attribute == "to":
                return lambda *args, **kwargs: _kjt(_plain(self).to(*args, **kwargs), name, reads)
            reads.add(name)
            return super().__getattribute__(attribute)

        def __getitem__(self, key: str) -> JaggedTensor:
            return _plain(self)[key]

    watched = object.__new__(Watched)
    object.__setattr__(watched, "__dict__", batch.__dict__)
    return watched


def _plain(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    plain = object.__new__(KeyedJaggedTensor)
    plain.__dict__ = object.__getattribute__(batch, "__dict__")
    return plain


def _unwatch(collection: nn.Module) -> None:
    """Let a collection read its batch: the file's takes the features that it looks up by name."""
    forward = collection.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {name: _plain(value) if isinstance(value, _Watched) else value for name, value in kwargs.items()}
        return forward(*(_plain(value) if isinstance(value, _Watched) else value for value in args), **given)

    collection.__dict__["forward"] = call
