"""``WholeGraph``: a converted model that runs as graphs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from recfx.collections.collection import unsharded_collections
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.copy_modules import carry_hooks
from recfx.collections.wrappers import unwrap
from recfx.errors import ConversionError, Diagnostic, RecfxError, short
from recfx.passes.base import PASSES_KEY
from recfx.runtime.base import tracer_of_call


@dataclass(frozen=True)
class Traced:
    """The whole-model graph of one mode, over the modules of the model."""

    graph_module: fx.GraphModule
    rollbacks: list[Diagnostic]  # what the trace could not enter, and why
    entered: tuple[str, ...]  # paths of the modules whose code is part of the graph
    constants: dict[tuple[str, str], Any]  # attributes of modules that are constants of the graph, by path and name
    not_compared: Exception | None = None  # the error of the Python model on the sample, if it could not be run


class WholeGraph(nn.Module):
    """A converted model that runs as graphs: one for training, one for eval, over the model's own modules.

    Parameters, buffers and submodules keep their names, and the graphs read them from here, so that others may take
    their places. Other attributes and methods are those of ``model``. ``train_graph`` and ``eval_graph`` are the
    graphs, ``traced`` by mode.
    """

    def __init__(self, model: nn.Module, traced: dict[bool, Traced]) -> None:
        super().__init__()
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[registry] = model.__dict__[registry]
        # Not registered: the graphs call the modules that are registered here already.
        self.__dict__["_traced"] = {mode: replace(graph, not_compared=None) for mode, graph in traced.items()}
        self.__dict__["_python_model"] = model
        self.__dict__["_collections"] = list(unsharded_collections(model).values())
        for collection in self.__dict__["_collections"]:
            collection.graph_is_inlined = True  # the graphs name the modules of its nodes
        carry_hooks(model, self)
        self.training = model.training
        self.__class__ = _with_signature_of(self.train_graph)

    @property
    def train_graph(self) -> fx.GraphModule:
        return self._of_mode(True).graph_module

    @property
    def eval_graph(self) -> fx.GraphModule:
        return self._of_mode(False).graph_module

    def _of_mode(self, training: bool) -> Traced:
        return self.__dict__["_traced"][training]

    @property
    def python_model(self) -> nn.Module:
        """The converted model that the graphs were traced from; it shares everything with them."""
        return self.__dict__["_python_model"]

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph of the current mode."""
        return self._of_mode(self.training).graph_module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_python_model")
            if model is None or name.startswith("__"):
                raise
            if hasattr(model, name):
                return getattr(model, name)
            if name in self.graph_module._buffers:  # a constant of the trace
                return self.graph_module._buffers[name]
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_python_model")
        of_model = model is not None and (name in model.__dict__ or hasattr(type(model), name))
        if of_model and name not in self.__dict__ and not hasattr(WholeGraph, name):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's forward (``mixed_modes``, ``outdated_graph``)."""
        traced = self._of_mode(self.training)
        check_modes(self, self.training, traced.entered)
        run = type(traced.graph_module).forward
        # torch.compile cannot follow what is thread-local.
        if torch.compiler.is_dynamo_compiling() or tracer_of_call(self, args, kwargs) is not None:
            return run(self, *args, **kwargs)
        check_constants(self.python_model, traced.constants)
        for collection in self.__dict__["_collections"]:
            collection.follow_optimizers()
        return run(self, *args, **kwargs)

    def train(self, mode: bool = True) -> WholeGraph:
        """Set the mode, as the class of the model does."""
        self.python_model.train(mode)
        self.training = mode
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _without_state, (), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for traced in self.__dict__["_traced"].values():
            traced.graph_module.recompile()
        self.__class__ = _with_signature_of(self.train_graph)


def _with_signature_of(graph_module: fx.GraphModule) -> type[WholeGraph]:
    """``WholeGraph`` with a ``forward`` of the same arguments: a tracer cannot follow ``*args``."""

    @functools.wraps(type(graph_module).forward)
    def forward(self: WholeGraph, *args: Any, **kwargs: Any) -> Any:
        return WholeGraph.forward(self, *args, **kwargs)

    forward.__doc__ = WholeGraph.forward.__doc__
    return type("WholeGraph", (WholeGraph,), {"forward": forward, "__module__": __name__})


def _without_state() -> WholeGraph:
    return WholeGraph.__new__(WholeGraph)


def check_modes(root: nn.Module, training: bool, entered: tuple[str, ...]) -> None:
    """Refuse to run the graph of one mode if parts of the model are in the other (``mixed_modes``)."""
    for path in entered:
        if root.get_submodule(path).training != training:
            raise ConversionError(
                f"it is in {'eval' if training else 'train'} mode, but the graph around it is for the other mode.",
                reason="mixed_modes",
                module_path=path,
                what_to_do="set one mode for the whole model, or convert without whole_graph=True.",
            )


def check_constants(root: nn.Module, constants: dict[tuple[str, str], Any]) -> None:
    """Refuse to run a graph if attributes of the model are no longer those that the graph has as constants."""
    module, of_module = root, ""
    for (path, name), constant in constants.items():
        if path != of_module:
            module, of_module = root.get_submodule(path), path
        own = module.__dict__
        value = own[name] if name in own else getattr(type(module), name, None)
        if value is not constant and value != constant:
            raise ConversionError(
                f"{name} is {short(value)}, but the graph was made when it was {short(constant)}.",
                reason="outdated_graph",
                module_path=path,
                what_to_do="make another graph, of .python_model, or convert without whole_graph=True.",
            )


def refuse_graph(model: nn.Module, error: type[RecfxError]) -> None:
    """Refuse a graph of ``recfx.trace``, whose code calls what is inside the converted collections."""
    graph = unwrap(model)
    if not isinstance(graph, fx.GraphModule):
        return
    calls = [node.target.partition(".graph_module.") for node in graph.graph.nodes if isinstance(node.target, str)]
    around = [graph.get_submodule(path) for path, inside, _ in calls if inside]
    if PASSES_KEY in graph.meta or any(isinstance(module, ConvertedCollection) for module in around):
        raise error(
            "this is a graph that was made by recfx.trace.",
            reason="traced_graph",
            what_to_do="pass the model that it was made from.",
        )


def share_children(model: nn.Module, other: nn.Module) -> None:
    """Register the model's own parameters, buffers and children on ``other``, under the same names, in the same order:
    a parameter with several names is known by the first. Buffers that only ``other`` has are no part of its state.
    """
    for registry in ("_parameters", "_buffers", "_modules"):
        registered, more = other.__dict__[registry], dict(other.__dict__[registry])
        registered.clear()
        registered.update(model.__dict__[registry])
        registered.update({name: value for name, value in more.items() if name not in registered})
        for name in registered:  # where code assigns to a buffer while it is traced, torch.fx puts a proxy
            if isinstance(other.__dict__.get(name), fx.Proxy):
                del other.__dict__[name]
    own = other._buffers.keys() - model._buffers.keys()
    other._non_persistent_buffers_set = model._non_persistent_buffers_set | own
