"""The exported program of format ``pt2``: ``torch.export`` runs the model's code around the exported graphs. It needs
no values: big buffers are not read, and arguments are zeros of the sample's shapes. Sizes that change with the batch
are symbols, 0 and 1 included; others are those of the sample.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from recfx.collections.copy_modules import own_modules
from recfx.errors import Diagnostic, ExportError
from recfx.exporter.compare_outputs import BIGGER, EMPTY, ModelCall
from recfx.exporter.loaded_program import LoadedProgram, flat_names, flat_tensors
from recfx.exporter.model_copies import detach_parameters, fresh_copy
from recfx.exporter.model_file import Program
from recfx.exporter.patterns import is_typed, take_apart
from recfx.exporter.serving.traced import contiguous_copy
from recfx.exporter.trace_model import WayFailed, trace_model, warmed
from recfx.models.sample import Sample
from recfx.models.trace_graph import with_forward
from recfx.runtime.base import has_forward_hooks

_LONGEST = 400  # characters of torch's messages


def traced_programs(call: ModelCall) -> Iterator[Program | Diagnostic]:
    """The model as ``torch.export`` traces it, and the graph of ``trace_model``, which has the hooks of collections, no
    code that reads their attributes, and no names that are keywords; or why there is none.
    """
    call = warmed(call)
    if call.changed_buffer is not None:
        path, _, name = call.changed_buffer.rpartition(".")
        message = f"its forward changes buffer {name!r}, which a program of torch.export would forget"
        yield Diagnostic("not_exportable", path, message)
        return
    try:
        tensors, symbols = _examples(call)
    except RuntimeError as error:  # the sample has what the program cannot take
        yield Diagnostic("not_exportable", "", str(error))
        return
    for name, tensor in zip(flat_names(call.signature), tensors, strict=True):
        if 0 in tensor.shape:
            message = f"size {tensor.shape.index(0)} of {name} is 0, as in every batch then; pass a bigger sample"
            yield Diagnostic("not_exportable", "", message)
            return
    if not any(has_forward_hooks(module) for module in call.model.modules() if id(module) in call.served):
        root = fresh_copy(call.model, call.graphs)[0]

        def call_whole(leaves: list[Any]) -> dict[str, torch.Tensor]:
            made = call.signature.call_of(leaves)
            return take_apart(call.returns, root(*made.args, **made.kwargs))

        yield _exported(root, call_whole, call, tensors, symbols)
    try:
        graph_module = trace_model(call)[0]
    except WayFailed as failed:
        yield failed.diagnostic
        return

    def call_graph(leaves: list[Any]) -> dict[str, torch.Tensor]:
        returned = graph_module(*leaves)
        return take_apart(call.returns, returned) if is_typed(call.returns) else returned

    yield _exported(graph_module, call_graph, call, tensors, symbols)


def _exported(
    root: nn.Module,
    run: Callable[[list[Any]], dict[str, torch.Tensor]],
    call: ModelCall,
    tensors: list[torch.Tensor],
    symbols: list[dict[int, Any]],
) -> Program | Diagnostic:
    """The program that calls ``run``, from the tensors and KJTs of the signature to the output tensors by name."""

    def call_flat(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        copies = map(contiguous_copy, tensors)
        return run([leaf.leaf_of(copies) for leaf in call.signature.leaves()])

    detach_parameters(own_modules(root))
    try:
        with torch.no_grad(), _quiet():
            entry = with_forward(type("Exported", (nn.Module,), {})(), flat_names(call.signature), call_flat)
            entry.model = root
            exported = torch.export.export(entry, tuple(tensors), dynamic_shapes=tuple(symbols))
    except Exception as error:  # user code under a tracer can raise anything; the reason is part of the error
        return _why_not(error, root)
    if EMPTY in call.other_calls:
        _without_checks_for_ids(exported.graph)
    exported.example_inputs = None  # not part of the file
    for tensors_by_name in (exported.state_dict, exported.constants):  # files have no sign or conjugation of a view
        for name, tensor in tensors_by_name.items():
            if isinstance(tensor, torch.Tensor) and (tensor.is_neg() or tensor.is_conj()):
                plain = tensor.detach().resolve_neg().resolve_conj()
                is_parameter = isinstance(tensor, nn.Parameter)
                tensors_by_name[name] = nn.Parameter(plain, requires_grad=False) if is_parameter else plain
    for module in exported.graph_module.modules():  # the lines of this machine's sources are not for servers
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    if (narrow := next(_narrow(exported), None)) is not None:
        return Diagnostic("not_exportable", "", f"the program does not take every batch: {narrow}")
    try:
        loaded = LoadedProgram(exported, call.signature)
    except SyntaxError as error:  # torch makes Python of the program, with the names of modules, which may be keywords
        return _why_not(error, root)
    called = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    saved = [*exported.state_dict.values(), *exported.constants.values()]
    return Program(
        named=loaded.named,
        save=partial(_save, exported),
        size=sum(tensor.nbytes for tensor in saved if isinstance(tensor, torch.Tensor)),
        operators={target.name() for target in called if isinstance(target, torch._ops.OpOverload)},
        buffers=lambda: {name.removeprefix("model."): value for name, value in loaded.program.named_buffers()},
        graph=str(exported.graph),
    )


def _save(exported: ExportedProgram, path: Path) -> None:
    """This takes memory for two copies of the biggest buffer, which torch makes of it."""
    with path.open("w+b") as file:  # of a path, torch would want to end with .pt2
        try:
            torch.export.save(exported, file)
        except RuntimeError as error:  # SerializeError, of a package that is not public
            raise ExportError(
                f"torch cannot save the program: {error}.",
                reason="not_exportable",
                what_to_do="compute what it names with tensors, or export TorchScript.",
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context without warnings about how torch and TorchRec use torch, nor the graph of a trace that fails."""
    with contextlib.ExitStack() as stack:
        for name in ("torch.fx._symbolic_trace", "torch.fx.experimental.symbolic_shapes"):
            stack.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _examples(call: ModelCall) -> tuple[list[torch.Tensor], list[dict[int, Any]]]:
    """Zeros of the sample's shapes, and which sizes are symbols: numbers of ids, and what changes with the batch size.
    Others are constants, as 0 and 1 would become, so the batch is made bigger, if its size is known.
    """
    bigger = call.other_calls.get(BIGGER)
    biggest = None if bigger is None else bigger.resized()
    shapes, used = _shapes(call, call.sample), _shapes(call, biggest or call.sample)
    changed = shapes if bigger is None else _shapes(call, bigger)
    symbols: list[dict[int, Any]] = []
    constant = Dim.AUTO if bigger is None else Dim.STATIC  # a program with limits is refused
    for before, after in zip(shapes, changed, strict=True):
        symbols.append({dim: constant if after[dim] == size else Dim.DYNAMIC for dim, size in enumerate(before)})
    number = 0
    for leaf in call.signature.leaves():
        parts = leaf.parts
        if leaf.kind != "tensor":
            lengths = used[number + 1]
            used[number + 1] = (*lengths[:-1], max(2, lengths[-1]))
            symbols[number + 1] = {len(lengths) - 1: Dim.DYNAMIC}
            ids = 2 * math.prod(lengths) + 7  # no size that something else has
            for part in {0, len(parts) - 1} - {1}:
                used[number + part] = (ids, *used[number + part][1:])
                symbols[number + part] = {0: Dim.DYNAMIC}
        number += len(parts)
    tensors = flat_tensors(call.signature, call.leaves(call.sample))
    return [tensor.new_zeros(shape) for tensor, shape in zip(tensors, used, strict=True)], symbols


def _narrow(exported: ExportedProgram) -> Iterator[str]:
    """The sizes for which the program has limits, in words: bounds above 2, and conditions that the trace found true of
    the sample, such as that two sizes differ, which a saved program would forget.
    """
    user_inputs = exported.graph_signature.user_inputs
    for node in exported.graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(node.meta["val"].shape if node.name in user_inputs else ()):
            if isinstance(size, int):
                continue
            expr, shape_env = size.node.expr, size.node.shape_env
            bounds = exported.range_constraints.get(expr)
            if bounds is not None and (bounds.lower > 2 or bounds.upper < sys.maxsize - 1):
                yield f"size {dim} of {node.name} would have to be from {bounds.lower} to {bounds.upper}"
            for guard in shape_env.guards:
                condition = shape_env.simplify(guard.expr)
                is_implied = shape_env._maybe_evaluate_static(condition, axioms=()) is not None  # by the bounds
                if expr.free_symbols & condition.free_symbols and not is_implied:
                    yield f"with size {dim} of {node.name} as {expr}, {condition} would have to be true"


def _without_checks_for_ids(graph: fx.Graph) -> None:
    """Take out that there must be ids, which TorchRec's ``permute`` asserts for tracers alone."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        if re.search(r"Ne\(.*, 0\)", str(node.args[1])) and all(map(_is_of_lengths, node.all_input_nodes)):
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_of_lengths(node: fx.Node) -> bool:
    """Whether the node compares or adds numbers of ``tolist`` alone, as TorchRec has them of the lengths per key."""
    if node.target is torch.ops.aten.item.default:
        (source,) = node.all_input_nodes
        return source.target in (operator.getitem, torch.ops.aten.select.int)
    return node.target in (torch.sym_not, operator.eq, operator.ne, operator.add) and all(
        map(_is_of_lengths, node.all_input_nodes)
    )


def _shapes(call: ModelCall, sample: Sample) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in flat_tensors(call.signature, call.leaves(sample))]


def _why_not(error: Exception, root: nn.Module) -> Diagnostic:
    """What the tracer says, the module that it was in, and the line of that module's code."""
    paths = {id(module): path for path, module in root.named_modules()}
    path, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if id(module) in paths and frame.f_code.co_filename != nn.modules.module.__file__:
            path, line = paths[id(module)], f" ({frame.f_code.co_filename}:{number})"
    lines = [text.strip() for text in str(error).strip().splitlines() if text.strip()]
    return Diagnostic("not_exportable", path, f"{type(error).__name__}: {' '.join(lines[:2])[:_LONGEST]}{line}")
