"""Find every collection of a model, say what can be converted, and why the rest cannot.

The module walk finds all of them, under every name that they have; with a sample, a shallow trace confirms where each
one is called.
"""

import functools
import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recfx.collections.copy_modules import copy_modules, own_modules
from recfx.collections.replaced import refuse_calls
from recfx.collections.wrappers import unwrap
from recfx.errors import Diagnostic
from recfx.ir.meta import SourceLocation
from recfx.models.classify import CONVERTIBLE, Finding, classify
from recfx.models.sample import Sample
from recfx.models.shallow_tracer import ShallowTracer, rollback_of
from recfx.models.trace_graph import source_of, trace_graph


@dataclass
class Discovery:
    """All collections of a model, and the modules that the trace could not enter."""

    findings: list[Finding]
    rollbacks: list[Diagnostic] = field(default_factory=list)

    def of(self, status: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == status]


def discover(model: nn.Module, sample: Sample | None = None) -> Discovery:
    """Find the collections of ``model``; changes nothing, and traces nothing without a sample."""
    findings: dict[int, Finding] = {}
    _walk(model, "", None, findings, set())
    discovery = Discovery(list(findings.values()))
    if sample is not None:
        _confirm_by_trace(model, sample, discovery)
    return discovery


def _walk(
    module: nn.Module, path: str, parent: nn.Module | None, findings: dict[int, Finding], ancestors: set[int]
) -> None:
    if id(module) in findings:
        findings[id(module)].paths.append(path)
        return
    finding = classify(module, path)
    if finding is not None:
        kind: Any = type(module if parent is None else parent)
        finding.source = _class_location(kind)
        findings[id(module)] = finding
        return
    if id(module) in ancestors or isinstance(module, torch.jit.ScriptModule):
        return
    for name, child in module._modules.items():
        if child is not None:
            # A container of torch's is not code of the user's, who has put it into something else.
            holder = parent if parent is not None and type(module).__module__.startswith("torch.nn.") else module
            _walk(child, f"{path}.{name}" if path else name, holder, findings, ancestors | {id(module)})


@functools.lru_cache(maxsize=1024)  # inspect parses the whole file to find a class
def _class_location(kind: Any) -> SourceLocation | None:
    try:
        file = inspect.getsourcefile(kind)
        _, line = inspect.getsourcelines(kind)
    except (OSError, TypeError):  # classes made in an interactive session or by exec have no source
        return None
    return None if file is None else SourceLocation(file, line)


def _confirm_by_trace(model: nn.Module, sample: Sample, discovery: Discovery) -> None:
    """Trace a copy of the modules in both modes; mark where each collection is called."""
    findings = {id(finding.module): finding for finding in discovery.findings}
    itself = findings.get(id(unwrap(model)))
    if itself is not None:  # the model is a collection, so calling the model calls the collection
        itself.found = "traced"
        return
    called: set[int] = set()
    hidden: set[int] = set()
    seen: set[tuple[str, str]] = set()
    for training in (True, False):
        root, copies = copy_modules(unwrap(model), own_tensors=True)  # code that is traced may change them
        set_mode(root, training)
        leaves = {id(copies[key]): key for key in findings if key in copies}
        tracer = ShallowTracer(set(leaves))
        try:
            graph = trace_graph(root, sample, tracer)
        except Exception as error:  # user code on proxies can raise anything; the reason goes into the report
            tracer.rollbacks.append(rollback_of("", error))
            hidden |= set(findings)
            graph = fx.Graph()
        counts = Counter[int]()
        for node in graph.find_nodes(op="call_module"):
            key = leaves.get(id(root.get_submodule(str(node.target))))
            if key is None:
                continue
            counts[key] += 1
            finding, site = findings[key], source_of(node)
            if site is not None and site not in finding.call_sites:
                finding.call_sites += (site,)
            finding.source = finding.call_sites[0] if finding.call_sites else finding.source
            finding.calls = max(finding.calls, counts[key])
        called |= counts.keys()
        for rollback in tracer.rollbacks:
            if rollback.path:
                inside = root.get_submodule(rollback.path)
                hidden |= {leaves[id(child)] for child in inside.modules() if id(child) in leaves}
            if (rollback.path, rollback.message) not in seen:
                seen.add((rollback.path, rollback.message))
                discovery.rollbacks.append(rollback)
        for finding in discovery.of(CONVERTIBLE):
            if id(finding.module) in copies:
                refuse_calls(copies[id(finding.module)], finding.path)  # in case that code keeps it
    for key, finding in findings.items():
        finding.found = "traced" if key in called else "walked" if key in hidden else "never called"


def set_mode(root: nn.Module, training: bool) -> None:
    """Call ``train`` of a copy, which may not change tensors, because they are those of the user's model, nor modules
    that the copy shares with it. If a class of the user's does, only ``training`` is set.
    """
    own = own_modules(root)
    modes = [(module, module.training) for module in set(root.modules()) - set(own)]
    try:
        with _NoWrites():
            root.train(training)
    except Exception:  # whatever the user's `train` raises; what the mode changes besides, a comparison shows
        for module in own:
            module.training = training
    for module, mode in modes:
        module.training = mode


class _NoWrites(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} changes a tensor")
        return func(*args, **(kwargs or {}))
