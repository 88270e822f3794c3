"""The whole model as one graph: islands inlined into a shallow trace, kept only after parity with the Python model."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from recfx.collection import converted_collections
from recfx.conversion import attach_conversion, conversion_of
from recfx.discovery import set_mode
from recfx.errors import ConversionError
from recfx.fx_leaf import tracer_of_call
from recfx.inline import inline_islands
from recfx.ir import verify_graph
from recfx.ir.meta import META_KEY
from recfx.islands import carry_hooks
from recfx.parity import Difference, compare_forward
from recfx.sample import Sample
from recfx.sharding.collection import sharded_collections
from recfx.shells import copy_shells
from recfx.tracing import Rollback, ShallowTracer, rollback_of, trace_graph


class WholeGraph(nn.Module):
    """A converted model that runs as graphs: one for training, one for eval, over the model's own modules.

    Parameters, buffers and submodules keep their names. ``train_graph`` and ``eval_graph`` are the graphs.

    Args:
        model: converted, without DDP or compile wrappers.
        sample: one call of it.

    Raises:
        ConversionError: ``untraceable_root``, ``whole_graph_differs``.
    """

    def __init__(self, model: nn.Module, sample: Sample) -> None:
        super().__init__()
        graphs, entered, rollbacks = {}, {}, []
        not_compared: dict[bool, str | None] = {}
        for training in (True, False):
            traced = build_whole_graph(model, sample, training)
            graphs[training], entered[training] = traced.graph_module, traced.entered
            rollbacks += [rollback for rollback in traced.rollbacks if rollback not in rollbacks]
            not_compared[training] = traced.not_compared
        if all(not_compared.values()):
            raise sample_failed(not_compared[model.training])
        for training, message in not_compared.items():
            if message:
                where = f"the graph of {'train' if training else 'eval'} mode was not compared: {message}"
                rollbacks.append(Rollback("", "not_compared", where))
        _share_children(model, self)
        # Not registered: the graphs call the modules that are registered here already.
        self.__dict__["_graphs"] = graphs
        self.__dict__["_entered"] = entered
        self.__dict__["_python_model"] = model
        carry_hooks(model, self)
        conversion = copy.copy(conversion_of(model))
        conversion.rollbacks = rollbacks
        attach_conversion(self, conversion)
        self.training = model.training
        self._take_signature()

    def _take_signature(self) -> None:
        """Let ``forward`` have the arguments of the graphs: a tracer cannot follow ``*args``."""
        self.__class__ = _with_signature_of(self.train_graph)

    @property
    def train_graph(self) -> fx.GraphModule:
        """The graph that runs in training mode."""
        graph: fx.GraphModule = self.__dict__["_graphs"][True]
        return graph

    @property
    def eval_graph(self) -> fx.GraphModule:
        """The graph that runs in eval mode."""
        graph: fx.GraphModule = self.__dict__["_graphs"][False]
        return graph

    @property
    def python_model(self) -> nn.Module:
        """The converted model that the graphs were traced from; it shares everything with them."""
        model: nn.Module = self.__dict__["_python_model"]
        return model

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph of the current mode."""
        return self.train_graph if self.training else self.eval_graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original model's.

        Raises:
            ConversionError: ``mixed_modes``.
        """
        check_modes(self, self.training, self.__dict__["_entered"][self.training])
        graph_module = self.graph_module
        if tracer_of_call(self, args, kwargs) is not None:  # its modules are this one's: no tracer finds it by itself
            return type(graph_module).forward(graph_module, *args, **kwargs)
        return graph_module(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _without_state, (), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        # A pickled GraphModule is its code; names and metadata of the nodes travel beside it.
        facts = {
            training: [(node.name, node.meta.get(META_KEY)) for node in graph_module.graph.nodes]
            for training, graph_module in self.__dict__["_graphs"].items()
        }
        return {**self.__dict__, "_node_facts": facts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        facts = state.pop("_node_facts")
        super().__setstate__(state)
        for training, graph_module in self.__dict__["_graphs"].items():
            for node, (name, meta) in zip(graph_module.graph.nodes, facts[training], strict=True):
                node.name = name
                if meta is not None:
                    node.meta[META_KEY] = meta
            graph_module.recompile()
        self._take_signature()


def _with_signature_of(graph_module: fx.GraphModule) -> type[WholeGraph]:
    """``WholeGraph`` with a ``forward`` of the same arguments as that of ``graph_module``."""
    _, *parameters = inspect.signature(type(graph_module).forward).parameters.values()
    scope: dict[str, Any] = {"run": WholeGraph.forward}
    declared = []
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty:
            declared.append(parameter.name)
        else:
            scope[f"default_of_{parameter.name}"] = parameter.default
            declared.append(f"{parameter.name}=default_of_{parameter.name}")
    names = ", ".join(parameter.name for parameter in parameters)
    exec(f"def forward(self, {', '.join(declared)}):\n    return run(self, {names})", scope)
    forward = scope["forward"]
    forward.__doc__ = WholeGraph.forward.__doc__
    forward.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return type("WholeGraph", (WholeGraph,), {"forward": forward, "__module__": __name__})


def _without_state() -> WholeGraph:
    return WholeGraph.__new__(WholeGraph)


@dataclass(frozen=True)
class Traced:
    """The whole-model graph of one mode.

    Args:
        graph_module: the graph, over the model's own modules.
        rollbacks: what could not be entered.
        entered: paths of the modules whose code is part of the graph, in that mode.
        not_compared: why the Python model could not be run on the sample, if so.
    """

    graph_module: fx.GraphModule
    rollbacks: list[Rollback]
    entered: tuple[str, ...]
    not_compared: str | None = None


def check_modes(root: nn.Module, training: bool, entered: tuple[str, ...]) -> None:
    """A graph holds the code of one mode; refuse to run it for parts that are in the other.

    Raises:
        ConversionError: ``mixed_modes``.
    """
    for path in entered:
        if root.get_submodule(path).training != training:
            raise ConversionError(
                f"it is in {'eval' if training else 'train'} mode, but the graph around it is for the other.",
                reason="mixed_modes",
                module_path=path,
                what_to_do="set one mode for the whole model, or convert without whole_graph=True.",
            )


def build_whole_graph(model: nn.Module, sample: Sample, training: bool) -> Traced:
    """The graph of one mode, over the modules of ``model``.

    Where the first trace differs from eager, modules between the root and the collections become opaque leaves.

    Raises:
        ConversionError: ``untraceable_root`` or ``whole_graph_differs``.
    """
    hookless, _ = copy_shells(model)  # the root's own hooks run around the graph, not in it
    carry_hooks(nn.Module(), hookless)
    opaque: frozenset[str] = frozenset()
    given_up: list[Rollback] = []
    while True:
        graph_module, rollbacks, entered = _trace(model, sample, training, opaque)
        difference = None if sample.on_meta() else compare_forward(hookless, graph_module, sample, training)
        if not isinstance(difference, Difference):
            return Traced(graph_module, given_up + rollbacks, tuple(sorted(entered)), difference)
        if entered <= opaque:
            raise _differs(difference, training)
        given_up += [Rollback(path, "graph_differs", str(difference)) for path in sorted(entered - opaque)]
        opaque |= entered


def _trace(
    model: nn.Module, sample: Sample, training: bool, opaque: frozenset[str]
) -> tuple[fx.GraphModule, list[Rollback], set[str]]:
    root, _ = copy_shells(model)
    set_mode(root, training)
    islands = {id(island) for island in (*converted_collections(root).values(), *sharded_collections(root).values())}
    tracer = ShallowTracer(islands, opaque)
    try:
        graph = trace_graph(root, sample, tracer)
        graph._tracer_cls = None  # pickles name it, and would need its arguments
        graph_module = fx.GraphModule(root, graph)  # a name that is no identifier may make code that does not compile
    except Exception as error:  # user code on proxies: the reason is part of the error
        found = rollback_of("", error)
        raise ConversionError(
            f"the model's own forward cannot be traced ({found.message}).",
            reason="untraceable_root",
            what_to_do="convert without whole_graph=True: islands need no trace.",
        ) from error
    entered = set(tracer.entered)
    _share_children(model, graph_module)
    inline_islands(graph_module)
    verify_graph(graph_module, after="whole_graph")
    graph_module.training = training  # not train(): its children are the model's own
    return graph_module, tracer.rollbacks, entered


def _share_children(model: nn.Module, other: nn.Module) -> None:
    """Register the model's own parameters, buffers and children on ``other``, under the same names."""
    for registry in ("_parameters", "_buffers", "_modules"):
        other.__dict__[registry].update(model.__dict__[registry])
    other._non_persistent_buffers_set = set(model._non_persistent_buffers_set)


def sample_failed(message: str | None) -> ConversionError:
    """The model cannot be called with the sample: a graph of it could not be compared with anything."""
    return ConversionError(
        f"the model cannot be called with the sample: {message}",
        reason="sample_failed",
        what_to_do="pass one call of the model that works.",
    )


def _differs(difference: Difference, training: bool) -> ConversionError:
    return ConversionError(
        f"the graph differs from the Python model in {'train' if training else 'eval'} mode: {difference}.",
        reason="whole_graph_differs",
        what_to_do="convert without whole_graph=True: islands keep the model's own code.",
    )
