"""Proxies of batches whose features are known while a model is traced, so that code may iterate over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.discovery.proxies import InPlaceProxy
from recfx.exporter.serving.named_inputs import check_plain


class _BatchType(type):
    """What ``type(features)`` is while tracing: models also call it, and its static methods, to make a batch."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], fx.Node):
            return super().__call__(*args, **kwargs)
        return KeyedJaggedTensor(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(KeyedJaggedTensor, name)


class BatchProxy(InPlaceProxy, metaclass=_BatchType):
    """A proxy of a KJT that has the features of its value; ``reads`` collects the nodes whose features are read."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, reads: set[fx.Node]) -> None:
        super().__init__(node, tracer)
        self._reads = reads

    def keys(self) -> list[str]:  # type: ignore[override]  # a proxy's would be a proxy
        """The names themselves: what is made of them is part of the graph."""
        return list(self._read().keys())

    def weights_or_none(self) -> fx.Proxy | None:
        """The weights; None, as code asks for it, where the batch has none."""
        if self._read().weights_or_none() is None:
            return None
        weights: fx.Proxy = self.weights()
        return weights

    def variable_stride_per_key(self) -> bool:
        """False: features of different batch sizes are not served."""
        self._read()
        return False

    def _read(self) -> KeyedJaggedTensor:
        self._reads.add(self.node)
        features: KeyedJaggedTensor = self.value
        return features


def has_known_features(node: fx.Node) -> bool:
    """Whether the names of the features of a KJT that a node takes or makes are constants."""
    if node.op == "placeholder":
        return True
    keys = ([*node.args[:1], node.kwargs.get("keys")] if node.target is KeyedJaggedTensor else [None])[0]
    return isinstance(keys, (list, tuple)) and all(isinstance(key, str) for key in keys)


def as_traced(features: KeyedJaggedTensor, argument: str, names: list[str], is_weighted: bool) -> KeyedJaggedTensor:
    """The batch, if its features are those that the traced code has read in the sample."""
    check_plain(argument, features)
    if (features.weights_or_none() is not None) != is_weighted:
        expected = "with" if is_weighted else "without"
        raise RuntimeError(f"{argument}: the model was exported for a batch {expected} weights [bad_weights]")
    if features.keys() != names:
        raise RuntimeError(
            f"{argument}: the model was exported for the features {names}, in this order [other_features]"
        )
    return features


def as_in_sample(tensor: torch.Tensor, argument: str, dtype: torch.dtype, dimensions: int) -> torch.Tensor:
    """The tensor, if it has the dtype and the rank that the traced code has read in the sample."""
    if tensor.dtype != dtype:
        raise RuntimeError(f"input {argument} has not the dtype of the sample, which the model reads [wrong_dtype]")
    if tensor.dim() != dimensions:
        raise RuntimeError(f"input {argument} must have {dimensions} dimensions [wrong_rank]")
    return tensor


def check_dtypes(graph: fx.Graph, arguments: dict[fx.Node, Any]) -> None:
    """Let the graph check that the dtypes and ranks of these arguments are those of the sample."""
    for node, value in arguments.items():
        if isinstance(value, torch.Tensor):
            _check(graph, node, as_in_sample, value.dtype, value.dim())
        else:
            parts = {"values": value.values(), "lengths": value.lengths(), "weights": value.weights_or_none()}
            for part, tensor in parts.items():
                if tensor is not None:
                    with graph.inserting_after(node):
                        read = graph.call_method(part, (node,))
                    _check(graph, read, as_in_sample, tensor.dtype, tensor.dim())


def check_read_features(graph: fx.Graph, reads: dict[fx.Node, KeyedJaggedTensor]) -> None:
    """Let the graph check the batches whose features the traced code has read, as the sample has them."""
    for node, features in reads.items():
        if node.op == "placeholder":
            _check(graph, node, as_traced, features.keys(), features.weights_or_none() is not None)


def _check(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], *expected: Any) -> None:
    argument = node if node.op == "placeholder" else node.all_input_nodes[0]
    with graph.inserting_after(node):
        checked = graph.call_function(function, (node, str(argument.target), *expected))
    node.replace_all_uses_with(checked, lambda user: user is not checked)
