"""What the modules of all nodes have in common, and what torch keeps on a module for hooks.

Tracers take these modules as leaves, because what a node does depends on the batch (kernels, indexes, autograd
functions); profiles show their names.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import ConversionError, type_of
from recfx.lowering.step.profiler_ranges import forward_range, is_profiling
from recfx.runtime.operators import constant
from recfx.versions.differences import is_fx_symbolic_tracing

FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""The attributes of modules that hold the hooks around ``forward``."""

MODULE_HOOKS = (
    *FORWARD_HOOKS,
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What ``nn.Module`` keeps per instance for hooks; a module that replaces another would lose them."""

_SUFFIXES = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def holds_hooks(name: str) -> bool:
    """Whether a module's attribute of this name is a dict of hooks; modules of users may have more than torch's."""
    return name.endswith(_SUFFIXES)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anything runs around the module's ``forward`` when the module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_call_hooks(module: nn.Module) -> bool:
    """Whether anything runs around the module's ``forward`` or its backward."""
    return has_forward_hooks(module) or bool(module._backward_hooks or module._backward_pre_hooks)


def load_hooks(module: nn.Module) -> dict[Any, Callable[..., Any]]:
    """What runs before the module loads its part of a state, and may rename keys; by key, as torch keeps it."""
    return module._load_state_dict_pre_hooks


def gets_its_module(hook: Any) -> bool:
    """Whether a hook is torch's object that refers weakly to the module, because it passes it on."""
    return type(hook).__module__ == "torch.nn.modules.module" and getattr(hook, "with_module", False) is True


@contextlib.contextmanager
def without_load_hooks(module: nn.Module) -> Iterator[None]:
    """A context in which the module loads without its hooks: they have run already."""
    hooks = module.__dict__["_load_state_dict_pre_hooks"]
    module.__dict__["_load_state_dict_pre_hooks"] = {}
    try:
        yield
    finally:
        module.__dict__["_load_state_dict_pre_hooks"] = hooks


class FxLeaf(nn.Module):
    """Base of the modules that become one ``call_module`` node: converted collections and the nodes of their graphs."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by ``torch.jit.script`` for a node outside of its collection; models are compiled as copies."""
        raise ConversionError(
            f"{type_of(self)} cannot be compiled by torch.jit.script: its kernels are chosen in Python.",
            reason="not_scriptable",
            module_path=str(getattr(self, "collection", "")),
            what_to_do="call recfx.export(model, path, sample); or script the whole converted model, or "
            "recfx.unconvert(model), which has TorchRec's own collections.",
        )

    def leaf_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_forward: bool = False) -> fx.Proxy | None:
        """The node for this call if a torch.fx tracer makes it; otherwise None. ``in_forward``: the tracer has entered
        the module, and so its hooks are part of the graph already.
        """
        tracer = tracer_of_call(self, args, kwargs)
        if tracer is None:
            return None
        path = tracer.path_of_module(self) or self.path_of_root()
        args, kwargs = _as_nodes(tracer, args, kwargs)
        if in_forward and has_forward_hooks(self):  # calling the module would run them too
            module = tracer.create_proxy("get_attr", path, (), {})
            return tracer.create_proxy("call_method", "forward", (module, *args), kwargs)
        return tracer.create_proxy("call_module", path, args, kwargs)

    def path_of_root(self) -> str:
        """The name under which a graph calls this module if it is itself the root of the trace; an error for nodes."""
        raise RuntimeError(f"{type_of(self)} cannot be the root of a trace")


def tracer_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Tracer | None:
    """The torch.fx tracer that makes this call of ``module``; None outside tracing."""
    if not is_fx_symbolic_tracing():
        return None
    for value in (*args, *kwargs.values()):
        if isinstance(value, fx.Proxy) and isinstance(value.tracer, fx.Tracer):
            return value.tracer
    # A batch of buffers or constants is not a proxy, but a tracer returns parameters as proxies.
    for owner in module.modules():
        for name in owner._parameters:
            tracer = getattr(getattr(owner, name), "tracer", None)
            return tracer if isinstance(tracer, fx.Tracer) else None
    return None


def _as_nodes(tracer: fx.Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments, with every batch that is a constant of the trace rebuilt from its tensors."""

    def expressed(value: Any) -> Any:
        if type(value) is not KeyedJaggedTensor:
            return value
        made = value.keys(), value.values(), value.weights_or_none(), value.lengths()
        return tracer.create_proxy("call_function", KeyedJaggedTensor, made, {"stride": value.stride()})

    return tuple(expressed(value) for value in args), {name: expressed(value) for name, value in kwargs.items()}


@torch.compiler.disable
def _opaque(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def opaque(why: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` outside the graph that torch.compile is building, which ends there. Nodes pass memory addresses
    and Python state to kernels; compilation cannot improve these, but would guard on both. With ``fullgraph=True``,
    torch's error says ``why``.
    """
    torch._dynamo.graph_break(msg=why)
    return _opaque(function, *args, **kwargs)


@constant
def why_opaque(node: Any, trains: bool) -> str:
    """Why a node, or a collection, cannot be in the graph that torch.compile is building; ``""`` if it can."""
    why: str = node.not_in_graph(trains)
    return f"recfx: {node.label} cannot be part of one graph: {why}" if why and isinstance(node, NodeModule) else why


class NodeModule(FxLeaf):
    """A module that a graph node calls; ``label`` is the node's name, under which profiles show its range."""

    def __init__(self) -> None:
        super().__init__()
        self.label = type(self).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as usual; if a torch.fx tracer calls it, it becomes one node of the graph."""
        if torch.compiler.is_dynamo_compiling():
            if why := why_opaque(self, torch.is_grad_enabled()):
                return opaque(why, self._call_impl, *args, **kwargs)
            return self.in_graph(*args, **kwargs)
        if is_fx_symbolic_tracing() and (proxy := self.leaf_call(args, kwargs)) is not None:
            return proxy
        if not is_profiling():
            return self._call_impl(*args, **kwargs)
        with forward_range(self.label):
            return self._call_impl(*args, **kwargs)

    def not_in_graph(self, trains: bool) -> str:
        """Why torch.compile cannot have the node in its graph now, as a sentence; ``trains``: with gradients."""
        return "what it does in Python depends on the ids of the batch."

    def in_graph(self, *args: Any, **kwargs: Any) -> Any:
        """``forward``, as torch.compile traces it."""
        return self.forward(*args, **kwargs)


class TracedNode(NodeModule):
    """A node that torch.compile traces as it is."""

    def not_in_graph(self, trains: bool) -> str:
        return ""
