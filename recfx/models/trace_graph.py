"""Traces a model as a sample calls it, by ``ShallowTracer``, and says which line of the user's code made each node.

What a graph would lose silently (autocast, activation checkpointing, gradient modes) raises while it is traced, and the
tracer makes a leaf of the module whose code it is.
"""

import contextlib
import inspect
import os
import re
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx, nn

from recfx.ir.meta import SourceLocation
from recfx.models.proxies import UNKNOWN, Observed
from recfx.models.sample import Sample, fixed_randomness
from recfx.models.shallow_tracer import NOT_THE_USERS, LostByTracing, ShallowTracer, expect_constant
from recfx.versions.differences import CHECKPOINT_WITHOUT_REENTRY

_TRACING_SEED = 20_260_101


def trace_graph(
    root: nn.Module, sample: Sample, tracer: ShallowTracer, *, inference: bool = False, observe: Sequence[Sample] = ()
) -> fx.Graph:
    """Trace ``root`` as ``sample`` calls it, in its current mode, and raise whatever its code raises on proxies. With
    ``inference``, the graph will never run backwards, so it may lack gradient modes and activation checkpointing. To
    calls to ``observe``, the sample first, these are run besides: proxies then have the classes of what they stand for.
    """
    target, names, concrete = _explicit_root(root, sample)
    # Random numbers drawn while tracing become constants of the graph; the comparison, under another seed, finds them.
    randomness, refusals = fixed_randomness(seed=_TRACING_SEED), _raise_where_a_graph_would_forget(inference)
    calls = [call.clone() for call in observe]
    runs = [Observed(target, dict(zip(names, call.args, strict=False)) | call.kwargs, tracer.leaves) for call in calls]
    tracer.observed, tracer.other_calls = (runs[0], runs[1:]) if runs else (None, [])
    tracer.watch_buffers(target)
    buffers = list(target.named_buffers())
    target.__dict__["named_buffers"] = lambda: buffers  # `self.steps += 1` puts proxies there, which have no hash
    try:
        with randomness, refusals:
            graph = tracer.trace(target, concrete_args=concrete or None)
        tracer.check_reads()
    finally:
        del target.__dict__["named_buffers"]
        for run in runs:
            run.end()
    tracer.erase_unused_items()
    _clone_changed_constants(graph, tracer.observed)
    root.__dict__.update({name: value for name, value in target.__dict__.items() if name not in root.__dict__})
    for node in list(graph.nodes):
        if node.op == "placeholder":
            name = re.sub(r"_1$", "", str(node.target))
            if concrete and name in concrete:
                node.target = name  # torch.fx renames specialised arguments; callers use the old name
        if isinstance(node.type, str):  # a postponed annotation; pickles and TorchScript need the type itself
            node.type = _type_hints(target).get("return" if node.op == "output" else str(node.target))
        if getattr(node.target, "__name__", "") == "_assert_is_none":  # with torch's function, no pickle can be loaded
            placeholder: Any = node.args[0]
            node.target, node.args = expect_constant, (placeholder, None, str(placeholder.target))
        if node.target is torch._assert and "has been specialized to" in str(node.args[1]):
            compared: Any = node.args[0]
            node.target, node.args = expect_constant, (*compared.args, str(compared.args[0].target))
            graph.erase_node(compared)
    return graph


def _clone_changed_constants(graph: fx.Graph, observed: Observed | None) -> None:
    """Let each call have its own copy of a tensor that ``forward`` has made, and that the graph may write into."""
    constants: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target).startswith("_tensor_constant"):
            constants.setdefault(str(node.target), []).append(node)
    for name, nodes in constants.items():
        users = [user for node in nodes for user in node.users]
        is_known = observed is not None and all(observed[user] is not UNKNOWN for user in users if user.op != "output")
        if observed is None or not is_known or observed.is_changed(name):
            with graph.inserting_after(nodes[0]):
                clone = graph.call_method("clone", (nodes[0],))
            for node in nodes:
                node.replace_all_uses_with(clone)
            clone.args = (nodes[0],)


def _type_hints(root: nn.Module) -> dict[str, Any]:
    try:
        return typing.get_type_hints(type(root).forward)
    except (NameError, AttributeError, TypeError):  # hints that only a type checker can resolve
        return {}


def _explicit_root(root: nn.Module, sample: Sample) -> tuple[nn.Module, list[str], dict[str, Any]]:
    """``root`` with a signature that has no ``*args``, its arguments' names, and those that the sample fixes."""
    signature = inspect.signature(type(root).forward)
    parameters = list(signature.parameters.values())
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    # torch.fx would make an argument for each item of a container.
    hidden = any(each.kind in variadic or isinstance(each.default, (dict, list, tuple)) for each in parameters)
    if hidden or "forward" in root.__dict__:
        original, count = root.__dict__.get("forward") or type(root).forward.__get__(root), len(sample.args)
        root = with_forward(
            root,
            [*(f"argument_{position}" for position in range(count)), *sample.kwargs],
            lambda *given: original(*given[:count], **dict(zip(sample.kwargs, given[count:], strict=True))),
        )
        parameters = list(inspect.signature(type(root).forward).parameters.values())
    names = [parameter.name for parameter in parameters[1:]]
    given = dict(zip(names, sample.args, strict=False)) | sample.kwargs
    concrete: dict[str, Any] = {}
    for parameter in parameters[1:]:
        if parameter.name not in given:
            if parameter.default is not inspect.Parameter.empty:
                concrete[parameter.name] = parameter.default
        elif given[parameter.name] is None or isinstance(given[parameter.name], (bool, str)):
            concrete[parameter.name] = given[parameter.name]
    return root, names, concrete


def with_forward(root: nn.Module, names: Iterable[str], call: Callable[..., Any]) -> nn.Module:
    """``root`` with a ``forward`` that passes arguments of these names to ``call``, one after the other."""
    arguments = ", ".join(names)
    scope: dict[str, Any] = {"__call": call}
    exec(f"def forward(self, {arguments}):\n    return __call({arguments})", scope)
    explicit = type(type(root).__name__, (type(root),), {"forward": scope["forward"]})
    duplicate: nn.Module = object.__new__(explicit)
    duplicate.__dict__ = {key: value for key, value in root.__dict__.items() if key != "forward"}
    return duplicate


@contextlib.contextmanager
def _raise_where_a_graph_would_forget(inference: bool) -> Iterator[None]:
    tracing_thread = threading.get_ident()

    def refuse(owner: Any, name: str, what: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def raise_instead(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != tracing_thread:  # other threads of the process may be training
                return original(*args, **kwargs)
            raise LostByTracing(f"{what} would be missing from the graph")

        return raise_instead

    checkpoint = torch.utils.checkpoint
    forgotten: list[tuple[Any, str, str]] = [
        (torch.autocast, "__enter__", "torch.autocast"),
        (torch.amp.autocast_mode, "_enter_autocast", "torch.autocast"),
    ]
    with contextlib.ExitStack() as stack:
        if inference:
            stack.enter_context(mock.patch.object(checkpoint.CheckpointFunction, "apply", _run_function))
            stack.enter_context(mock.patch.object(checkpoint, CHECKPOINT_WITHOUT_REENTRY, _run_in_yield))
        else:
            forgotten += [
                (torch.set_grad_enabled, "__init__", "torch.set_grad_enabled"),
                (torch.autograd.graph.saved_tensors_hooks, "__enter__", "saved_tensors_hooks"),
                (torch.no_grad, "__enter__", "torch.no_grad"),
                (torch.enable_grad, "__enter__", "torch.enable_grad"),
                (torch.inference_mode, "__enter__", "torch.inference_mode"),
                (checkpoint, CHECKPOINT_WITHOUT_REENTRY, "activation checkpointing"),
                (checkpoint.CheckpointFunction, "apply", "activation checkpointing"),
            ]
        for owner, name, what in forgotten:
            stack.enter_context(mock.patch.object(owner, name, refuse(owner, name, what)))
        yield


def _run_function(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


def _run_in_yield(function: Callable[..., Any], *settings: Any, **keywords: Any) -> Iterator[None]:
    """Torch calls the checkpointed function itself between the two steps of this generator."""
    yield


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def source_of(node: fx.Node) -> SourceLocation | None:
    """The line of the user's code that made a traced node, which may be in a package such as TorchRec."""
    frames = _FRAME.findall(node.stack_trace or "")
    # What comes before is on the way to the trace, not to the node.
    start = max((place for place, frame in enumerate(frames) if frame[2] == trace_graph.__name__), default=-1)
    lines = [
        SourceLocation(file, int(line))
        for file, line, _ in frames[start + 1 :]
        if not file.startswith((*NOT_THE_USERS, "<string>"))
    ]
    if not lines:
        return None
    own = [line for line in lines if not any(folder in line.file for folder in _INSTALLED)]
    return lines[-1] if not own or own[-1] == lines[-1] else replace(lines[-1], called_from=own[-1])
