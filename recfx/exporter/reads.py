"""What the model's own code reads of its arguments, besides what it asks for by name.

The model runs once with arguments that record it. Programs of ``torch.export`` take KJTs apart into the sample's
features, and files of every format rebuild dicts in the sample's order, so both matter where they are read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.discovery.nests import leaves_of, nest_of
from recfx.discovery.sample import Sample
from recfx.exporter.arguments import Signature
from recfx.exporter.compare_outputs import first_difference, run_as_is, run_model
from recfx.exporter.model_copies import fresh_copy
from recfx.exporter.returns import return_pattern, take_apart

_BY_NAME = frozenset({"__class__", "device", "inverse_indices_or_none", "stride", "variable_stride_per_key"})
"""What is the same for a KJT with other features besides; and files refuse those with inverse indices or strides."""


def read_as_a_whole(
    model: nn.Module, collections: Iterable[nn.Module], sample: Sample, signature: Signature
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the KJTs of which the model reads more than features by name, of the batches that it returns as they
    are, and the paths of the dicts over which it iterates. If the model does not take the arguments that record this,
    all of them.
    """
    reads: set[str] = set()
    returned_too: tuple[str, ...] = ()
    copy, copies = fresh_copy(model)
    sample = sample.clone()
    leaves = signature.flatten(sample.args, sample.kwargs)
    names = [leaf.name if leaf.kind == "kjt" else "" for leaf in signature.leaves()]
    watched = _Watched({id(leaf): (name, leaf) for leaf, name in zip(leaves, names, strict=True) if name}, reads)
    for collection in collections:
        watched.let_read(copies[id(collection)])
    call = signature.call_of(leaves)
    dicts: list[str] = []
    values = [*call.args, *call.kwargs.values()]
    values = [_nest(value, name, reads, dicts) for name, value in zip(signature.parameters, values, strict=True)]
    keywords = zip(call.kwargs, values[len(call.args) :], strict=True)
    try:
        with watched:
            returned = run_as_is(copy, Sample(*values[: len(call.args)], **dict(keywords)))
        of_arguments = {id(leaf): leaf_of.name for leaf, leaf_of in zip(leaves, signature.leaves(), strict=True)}
        whole = {id(value) for value in leaves_of(returned) if isinstance(value, (JaggedTensor, KeyedJaggedTensor))}
        returned_too = tuple(name for of, name in of_arguments.items() if of in whole)
    except Exception:  # whatever the user's code raises
        reads |= {*names, *dicts}
    if dicts and not _is_same_for_other_orders(model, sample):
        reads |= {*dicts}
    exact = dict.fromkeys([*(name for name in names if name in reads and name), *returned_too])
    return tuple(exact), tuple(path for path in dicts if path in reads)


def _is_same_for_other_orders(model: nn.Module, sample: Sample) -> bool:
    """Whether the model answers alike if its dicts come in other orders: it may not take those that record."""
    calls = [sample]
    for order in (lambda keys: keys[::-1], lambda keys: keys[1:] + keys[:1]):
        args, kwargs = _reordered((list(sample.args), dict(sample.kwargs)), order)
        calls.append(Sample(*args, **kwargs))
    try:
        answers = [run_model(fresh_copy(model)[0], call) for call in calls]
        first, *others = (sorted(take_apart(return_pattern(answer), answer).items()) for answer in answers)
    except Exception:  # whatever the user's code raises
        return False
    return all(first_difference(first, other) is None for other in others)


def _reordered(value: Any, order: Callable[[list[Any]], list[Any]]) -> Any:
    """A nest whose dicts have their keys in another order."""
    nest = None if isinstance(value, KeyedJaggedTensor) else nest_of(value)
    if nest is None:
        return value
    items = {key: _reordered(item, order) for key, item in nest.items.items()}
    made = nest.make(list(items.values()))
    if nest.kind == "dict":
        for key in order(list(items)):  # to the end, one after the other
            made[key] = made.pop(key)
    return made


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


class _Watched:
    """A context in which batches add their names to ``reads`` if somebody reads more of them than features by name.

    They keep their class, by which a model may ask for them.

    Args:
        batches: their names, and they themselves, by ``id``.
    """

    def __init__(self, batches: dict[int, tuple[str, KeyedJaggedTensor]], reads: set[str]) -> None:
        self._batches, self._reads = batches, reads

    def __enter__(self) -> None:
        item = KeyedJaggedTensor.__getitem__

        def get(batch: KeyedJaggedTensor, attribute: str) -> Any:
            name, _ = self._batches.get(id(batch), ("", None))
            if name and attribute in _BY_NAME:
                return getattr(_plain(batch), attribute)
            if name and attribute == "to":
                return lambda *args, **kwargs: self._copied(_plain(batch).to(*args, **kwargs), name)
            if name:
                self._reads.add(name)
            return object.__getattribute__(batch, attribute)

        def by_name(batch: KeyedJaggedTensor, key: str) -> JaggedTensor:
            plain = _plain(batch)
            keys = plain.keys()
            if key not in keys:  # other batches may have it
                self._reads.add(self._batches.get(id(batch), ("", None))[0])
            return item(plain, key)

        KeyedJaggedTensor.__getattribute__ = get
        KeyedJaggedTensor.__getitem__ = by_name
        self._item = item

    def __exit__(self, *error: object) -> None:
        del KeyedJaggedTensor.__getattribute__
        KeyedJaggedTensor.__getitem__ = self._item

    def _copied(self, batch: KeyedJaggedTensor, name: str) -> KeyedJaggedTensor:
        self._batches[id(batch)] = name, batch
        return batch

    def let_read(self, collection: nn.Module) -> None:
        """Let a collection read its batch: the file's takes the features that it looks up by name."""
        forward = collection.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            given = {name: self._plain(value) for name, value in kwargs.items()}
            return forward(*map(self._plain, args), **given)

        collection.__dict__["forward"] = call

    def _plain(self, value: Any) -> Any:
        return _plain(value) if id(value) in self._batches else value


def _plain(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    plain = object.__new__(KeyedJaggedTensor)
    plain.__dict__ = object.__getattribute__(batch, "__dict__")
    return plain
