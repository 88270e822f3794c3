"""What the model's own code reads of its arguments, besides what it asks for by name.

The model runs once with arguments that record it. Programs of ``torch.export`` take KJTs apart into the sample's
features, which matters where they are read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.discovery.nests import leaves_of
from recfx.discovery.sample import Sample
from recfx.exporter.arguments import Signature
from recfx.exporter.compare_outputs import run_as_is
from recfx.exporter.model_copies import fresh_copy

_BY_NAME = frozenset({"__class__", "device", "inverse_indices_or_none", "stride", "variable_stride_per_key"})
"""What is the same for a KJT with other features besides; and files refuse those with inverse indices or strides."""


def read_as_a_whole(
    model: nn.Module, collections: Iterable[nn.Module], sample: Sample, signature: Signature
) -> tuple[str, ...]:
    """The names of the batches that must be as the sample's.

    Those are the KJTs of which the model reads more than features by name, the batches without weights that it asks
    for weights, and those that it returns as they are. If the model does not take such arguments, all of them.
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
    try:
        with watched:
            returned = run_as_is(copy, call)
        of_arguments = {id(leaf): leaf_of.name for leaf, leaf_of in zip(leaves, signature.leaves(), strict=True)}
        whole = {id(value) for value in leaves_of(returned) if isinstance(value, KeyedJaggedTensor)}
        returned_too = tuple(name for of, name in of_arguments.items() if of in whole)
    except Exception:  # whatever the user's code raises
        reads |= {*names}
    return tuple(dict.fromkeys([*(name for name in names if name in reads and name), *returned_too]))


class _Watched:
    """A context in which batches add their names to ``reads`` if somebody reads more of them than features by name.

    ``batches`` has their names, and they themselves, by ``id``: they keep their class, by which a model may ask for
    them.
    """

    def __init__(self, batches: dict[int, tuple[str, KeyedJaggedTensor]], reads: set[str]) -> None:
        self._batches, self._reads = batches, reads
        self._unweighted: dict[int, tuple[str, JaggedTensor]] = {}

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
            plain, (name, _) = _plain(batch), self._batches.get(id(batch), ("", None))
            keys = plain.keys()
            if key not in keys:  # other batches may have it
                self._reads.add(name)
            feature = item(plain, key)
            self.watch_weights(feature, name)
            return feature

        def reading_weights(method: Callable[[JaggedTensor], Any]) -> Callable[[JaggedTensor], Any]:
            def read(batch: JaggedTensor) -> Any:
                self._reads.add(self._unweighted.get(id(batch), ("", None))[0])
                return method(batch)

            return read

        KeyedJaggedTensor.__getattribute__ = get
        KeyedJaggedTensor.__getitem__ = by_name
        self._item = item
        self._of_weights = {name: getattr(JaggedTensor, name) for name in ("weights", "weights_or_none")}
        for name, method in self._of_weights.items():
            setattr(JaggedTensor, name, reading_weights(method))

    def __exit__(self, *error: object) -> None:
        del KeyedJaggedTensor.__getattribute__
        KeyedJaggedTensor.__getitem__ = self._item
        for name, method in self._of_weights.items():
            setattr(JaggedTensor, name, method)

    def watch_weights(self, batch: JaggedTensor, name: str) -> None:
        """Add the name to ``reads`` if somebody asks a batch without weights for them."""
        if batch.weights_or_none() is None:
            self._unweighted[id(batch)] = name, batch

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
