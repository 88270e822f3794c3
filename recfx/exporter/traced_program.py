"""The exported program of format ``pt2``: ``torch.export`` runs the model's code around the exported graphs.

It is a tracer itself, which sees through dataclasses and other Python, so nothing needs to trace the model before it.
It needs no values: big buffers are not read, and the arguments are zeros of the sample's shapes. Sizes that change with
the batch are symbols, 0 and 1 included; others are those of the sample.
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

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from recfx.collections.copy_modules import own_modules
from recfx.discovery.sample import Sample
from recfx.discovery.shallow_tracer import with_forward
from recfx.errors import Diagnostic, ExportError
from recfx.exporter.arguments import Signature
from recfx.exporter.compare_outputs import run_copy
from recfx.exporter.loaded_program import LoadedProgram, flat_names, flat_tensors, join_tensors
from recfx.exporter.model_call import BIGGER, EMPTY, ModelCall
from recfx.exporter.model_copies import detach_parameters, fresh_copy, own_buffers
from recfx.exporter.model_file import Program
from recfx.exporter.patterns import Pattern
from recfx.exporter.returns import is_typed, take_apart
from recfx.exporter.serving.traced import contiguous_copy
from recfx.exporter.trace_model import WayFailed, trace_model, warmed
from recfx.runtime.base import has_forward_hooks
from recfx.versions.differences import programs_without_stacks

_LONGEST = 400  # characters of torch's messages

Run = Callable[[list[Any]], dict[str, torch.Tensor]]
"""Maps the tensors and KJTs of the signature to the output tensors by name."""


Examples = tuple[list[torch.Tensor], list[dict[int, Any]]]
"""The program's arguments, and which of their sizes are symbols."""


def traced_programs(call: ModelCall) -> Iterator[Program]:
    """The model as ``torch.export`` traces it, or else the graph that ``trace_model.py`` has traced.

    That graph has the hooks of collections, no code that reads their attributes, and no names that are keywords.
    """
    call = warmed(call)
    changed = call.changed_buffer or _assigned_buffer(call)
    if changed is not None:
        path, _, name = changed.rpartition(".")
        message = f"its forward changes buffer {name!r}, which a program of torch.export would forget"
        call.failures.append(Diagnostic("not_exportable", path, message))
        return
    try:
        examples = _examples(call)
    except RuntimeError as error:  # the sample has what the program cannot take
        call.failures.append(Diagnostic("not_exportable", "", str(error)))
        return
    for name, tensor in zip(flat_names(call.signature), examples[0], strict=True):
        if 0 in tensor.shape:
            message = f"size {tensor.shape.index(0)} of {name} is 0, as in every batch then; pass a bigger sample"
            call.failures.append(Diagnostic("not_exportable", "", message))
            return
    if not any(has_forward_hooks(module) for module in call.model.modules() if id(module) in call.served):
        root = fresh_copy(call.model, call.graphs)[0]

        def call_whole(leaves: list[Any]) -> dict[str, torch.Tensor]:
            made = call.signature.call_of(leaves)
            return take_apart(call.returns, root(*made.args, **made.kwargs))

        yield from _exported(root, call_whole, call, examples)
    try:
        graph_module = trace_model(call).graph_module
    except WayFailed as failed:
        call.failures.append(failed.diagnostic)
        return
    yield from _exported(graph_module, _flat_call(graph_module, call.returns), call, examples)


def _assigned_buffer(call: ModelCall) -> str | None:
    """The name of a buffer that a call puts another tensor in the place of, even one with the same values."""
    copy, _ = fresh_copy(call.model)
    before = own_buffers(copy)
    run_copy(call.model, call.sample, copy)
    return next((name for name, buffer in own_buffers(copy).items() if buffer is not before.get(name)), None)


def _exported(root: nn.Module, run: Run, call: ModelCall, examples: Examples) -> Iterator[Program]:
    detach_parameters(own_modules(root))
    tensors, symbols = examples
    try:
        with torch.no_grad(), _quiet():
            entry = _entry(root, run, call.signature)
            exported = torch.export.export(entry, tuple(tensors), dynamic_shapes=tuple(symbols))
    except Exception as error:  # user code under a tracer can raise anything; the reason is part of the error
        call.failures.append(_why_not(error, root))
        return
    if EMPTY in call.other_calls:
        _without_checks_for_ids(exported.graph)
    exported.example_inputs = None  # not part of the file
    for tensors_by_name in (exported.state_dict, exported.constants):  # files have no sign or conjugation of a view
        for name, tensor in tensors_by_name.items():
            if isinstance(tensor, torch.Tensor) and (tensor.is_neg() or tensor.is_conj()):
                plain = tensor.detach().resolve_neg().resolve_conj()
                is_parameter = isinstance(tensor, nn.Parameter)
                tensors_by_name[name] = nn.Parameter(plain, requires_grad=False) if is_parameter else plain
    for module in exported.graph_module.modules():  # torch 2.11 and older record stacks in spite of `_quiet`
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    if (narrow := next(_narrow(exported), None)) is not None:
        call.failures.append(Diagnostic("not_exportable", "", f"the program does not take every batch: {narrow}"))
        return
    try:
        yield _program(exported, call.signature)
    except SyntaxError as error:  # torch makes Python of the program, with the names of modules, which may be keywords
        call.failures.append(_why_not(error, root))


def _program(exported: ExportedProgram, signature: Signature) -> Program:
    loaded = LoadedProgram(exported, signature)
    called = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    tensors = [*exported.state_dict.values(), *exported.constants.values()]
    return Program(
        named=loaded.named,
        save=partial(_save, exported),
        size=sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)),
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
    """A context without warnings about how torch and TorchRec use torch, without the graph that torch prints if a trace
    fails, and in which programs get no stack for each node.

    Stacks take a tenth of the time, and the paths and lines of this machine's sources are not for servers.
    """
    loggers = [logging.getLogger(f"torch.fx.{name}") for name in ("_symbolic_trace", "experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), programs_without_stacks(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _examples(call: ModelCall) -> Examples:
    """Zeros of the sample's shapes, and which sizes are symbols: numbers of ids, and what changes with the batch size.
    Others are constants.

    A size of 0 or 1 would become a constant of the program, so the batch is made bigger, if its size is known.
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
    """The sizes for which the program has limits, in words. torch takes 2 and more for each.

    Besides bounds, these are the conditions that the trace found true of the sample, such as that two sizes differ: a
    saved program would forget them.
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
    """Take out that there must be ids, which TorchRec's ``permute`` asserts for tracers alone. The file is compared
    with the model for a batch without ids.
    """
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


def _flat_call(graph_module: nn.Module, returns: Pattern) -> Run:
    """Calls a graph, which takes the tensors and KJTs themselves."""

    def run(leaves: list[Any]) -> dict[str, torch.Tensor]:
        returned = graph_module(*leaves)
        return take_apart(returns, returned) if is_typed(returns) else returned

    return run


def _entry(root: nn.Module, run: Run, signature: Signature) -> nn.Module:
    """A module that takes tensors and returns tensors by name."""

    def call_flat(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return run(list(join_tensors(signature, map(contiguous_copy, tensors))))

    entry = with_forward(type("Exported", (nn.Module,), {})(), flat_names(signature), call_flat)
    entry.model = root
    return entry


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
