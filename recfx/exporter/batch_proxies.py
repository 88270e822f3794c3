"""Proxies of batches whose features are known while a model is traced, so that code may iterate over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.discovery.shallow_tracer import InPlaceProxy
from recfx.exporter.serving.named_inputs import check_plain


@dataclass(frozen=True)
class Features:
    """What is known about a batch: its features, in order, and whether it has weights."""

    names: tuple[str, ...]
    is_weighted: bool


class CopiedProxy(InPlaceProxy):
    """A proxy of which a deep copy is the same value, not a copy of the graph."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedProxy:
        return self


class _BatchType(type):
    """What ``type(features)`` is while tracing: models also call it, and its static methods, to make a batch."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], fx.Node):
            return super().__call__(*args, **kwargs)
        return KeyedJaggedTensor(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(KeyedJaggedTensor, name)


class BatchProxy(CopiedProxy, metaclass=_BatchType):
    """A proxy of a KJT that has these features, all with one batch size; ``isinstance`` takes it for one.

    Args:
        node: its node.
        tracer: the tracer.
        features: its features.
        reads: collects the nodes whose features the traced code has read.
    """

    def __init__(self, node: fx.Node, tracer: fx.Tracer, features: Features, reads: set[fx.Node]) -> None:
        super().__init__(node, tracer)
        self._features = features
        self._reads = reads

    @property
    def __class__(self) -> Any:
        return KeyedJaggedTensor

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("a proxy keeps its class")

    def keys(self) -> list[str]:  # type: ignore[override]  # a proxy's would be a proxy
        """The names themselves: what is made of them is part of the graph."""
        return list(self._read().names)

    def weights_or_none(self) -> fx.Proxy | None:
        """The weights; None, as code asks for it, where the batch has none."""
        if not self._read().is_weighted:
            return None
        weights: fx.Proxy = self.weights()
        return weights

    def variable_stride_per_key(self) -> bool:
        """False: features of different batch sizes are not served."""
        self._read()
        return False

    def _read(self) -> Features:
        self._reads.add(self.node)
        return self._features


def features_made_by(node: fx.Node) -> Features | None:
    """The features of the KJT that a node makes; None if their names are not known."""
    if node.target is not KeyedJaggedTensor:
        return None
    arguments = dict(zip(("keys", "values", "weights"), node.args, strict=False)) | node.kwargs
    keys = arguments["keys"]
    if not isinstance(keys, (list, tuple)) or not all(isinstance(key, str) for key in keys):
        return None
    return Features(tuple(str(key) for key in keys), arguments.get("weights") is not None)


def as_traced(features: KeyedJaggedTensor, argument: str, names: list[str], is_weighted: bool) -> KeyedJaggedTensor:
    """The batch, if its features are those that the traced code has read in the sample.

    Raises:
        RuntimeError: it has other features, or these in another order. TorchScript knows no other error.
    """
    check_plain(argument, features)
    if (features.weights_or_none() is not None) != is_weighted:
        expected = "with" if is_weighted else "without"
        raise RuntimeError(f"{argument}: the model was exported for a batch {expected} weights [bad_weights]")
    if features.keys() != names:
        raise RuntimeError(
            f"{argument}: the model was exported for the features {names}, in this order [other_features]"
        )
    return features


def check_read_features(graph: fx.Graph, reads: set[fx.Node], features: dict[str, Features]) -> None:
    """Let the graph check the batches whose features the traced code has read: those at ``reads``."""
    for node in graph.find_nodes(op="placeholder"):
        if node in reads:
            expected = features[str(node.target)]
            with graph.inserting_after(node):
                arguments = (node, str(node.target), list(expected.names), expected.is_weighted)
                checked = graph.call_function(as_traced, arguments)
            node.replace_all_uses_with(checked, lambda user, checked=checked: user is not checked)
