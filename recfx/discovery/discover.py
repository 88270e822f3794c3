"""Find every collection of a model, say what can be converted, and why the rest cannot.

The module walk finds all of them, under every name that they have; with a sample, a shallow trace confirms where each
one is called.
"""

from __future__ import annotations

import functools
import inspect
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from recfx.collections.copy_modules import copy_modules
from recfx.collections.kinds import kind_of
from recfx.collections.object_kinds import own_modules
from recfx.collections.wrappers import unwrap
from recfx.discovery.bypass import BYPASSED, bypassed, find_bypassed, put_back
from recfx.discovery.classify import CONVERTIBLE, Finding, classify
from recfx.discovery.id_ranges import IdRanges
from recfx.discovery.sample import Sample
from recfx.discovery.shallow_tracer import ShallowTracer, rollback_of, source_of, trace_graph
from recfx.errors import Diagnostic
from recfx.ir.meta import SourceLocation
from recfx.ir.tables import IdRange


@dataclass
class Discovery:
    """All collections of a model, and the modules that the trace could not enter."""

    findings: list[Finding]
    rollbacks: list[Diagnostic] = field(default_factory=list)

    def of(self, status: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == status]


def discover(model: nn.Module, sample: Sample | None = None, *, calls_are_counted: bool = False) -> Discovery:
    """Find the collections of ``model``; changes nothing, and traces nothing without a sample. Unless the caller will
    verify the conversion, and so count calls, suspected collections are refused here.
    """
    findings: dict[int, Finding] = {}
    _walk(model, "", None, findings, set())
    discovery = Discovery(list(findings.values()))
    find_bypassed(model, discovery.findings)
    if not calls_are_counted:
        for finding in discovery.of(CONVERTIBLE):
            if finding.suspected is not None:
                finding.refuse(finding.suspected)
    # A trace runs the model's code, which would change the user's own objects if it reached them.
    reaches_originals = any(
        finding.suspected or finding.never_called or finding.reason == BYPASSED for finding in discovery.findings
    )
    if sample is not None and not reaches_originals:
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
    ranges: dict[int, list[dict[str, IdRange]]] = {}  # one dict per call, by collection
    originals: dict[int, nn.Module] = {}  # by id of the traced copy
    traced: list[nn.Module] = []
    for training in (True, False):
        root, copies = copy_modules(unwrap(model))
        for module in unwrap(model).modules():
            if copies.get(id(module), module) is not module:
                originals[id(copies[id(module)])] = module
                traced.append(copies[id(module)])
        set_mode(root, training)
        _own_tensor_attributes(root)
        leaves = {id(copies[key]): key for key in findings if key in copies}
        tracer = ShallowTracer(set(leaves))
        try:
            graph = trace_graph(root, sample, tracer)
        except Exception as error:  # user code on proxies can raise anything; the reason goes into the report
            tracer.rollbacks.append(rollback_of("", error))
            hidden |= set(findings)
            graph = fx.Graph()
        counts: dict[int, int] = {}
        id_ranges = IdRanges(graph, root, _inputs(graph, sample))
        for node in graph.nodes:
            if node.op == "call_module":
                module = root.get_submodule(str(node.target))
                if id(module) in leaves:
                    counts[leaves[id(module)]] = counts.get(leaves[id(module)], 0) + 1
                    finding = findings[leaves[id(module)]]
                    called.add(id(finding.module))
                    if finding.status == CONVERTIBLE:
                        known = id_ranges.of_call(node, _features(finding.module))
                        ranges.setdefault(leaves[id(module)], []).append(known)
                    site = source_of(node)
                    if site is not None and site not in finding.call_sites:
                        finding.call_sites += (site,)
                    finding.source = finding.call_sites[0] if finding.call_sites else finding.source
        for key, count in counts.items():
            findings[key].calls = max(findings[key].calls, count)
        for rollback in tracer.rollbacks:
            if rollback.path:
                inside = root.get_submodule(rollback.path)
                hidden |= {leaves[id(child)] for child in inside.modules() if id(child) in leaves}
            if (rollback.path, rollback.message) not in seen:
                seen.add((rollback.path, rollback.message))
                discovery.rollbacks.append(rollback)
    way = put_back(unwrap(model), originals, traced)
    for finding in discovery.of(CONVERTIBLE) if way else ():
        finding.refuse(bypassed(finding.path, f"calling the model puts a module of it into {way}"))
    for key, finding in findings.items():
        finding.found = "traced" if key in called else "walked" if key in hidden else "never called"
        if key not in hidden and key in ranges:  # all of its calls were seen
            finding.id_ranges = _of_all_calls(ranges[key])


def _features(collection: nn.Module) -> list[str]:
    return [feature for config in kind_of(collection).configs_of(collection) for feature in config.feature_names]


def _inputs(graph: fx.Graph, sample: Sample) -> dict[str, Any]:
    """The sample's values by name of the placeholders that stand for them."""
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return dict(zip(names, sample.args, strict=False)) | sample.kwargs


def _of_all_calls(calls: list[dict[str, IdRange]]) -> dict[str, IdRange]:
    """The ranges of the features of which a range is known in every call."""
    first, *others = calls
    return {
        feature: functools.reduce(operator.or_, (call[feature] for call in others), known)
        for feature, known in first.items()
        if all(feature in call for call in others)
    }


def set_mode(root: nn.Module, training: bool) -> None:
    """Like ``root.train(training)``, but does not touch modules that the copy shares with the user's model."""
    for module in own_modules(root):
        module.training = training


def _own_tensor_attributes(root: nn.Module) -> None:
    """Clone plain tensor attributes: they are not proxies, so code that is traced would change the user's in place."""
    for module in own_modules(root):
        for name, value in module.__dict__.items():
            if issubclass(type(value), torch.Tensor):
                module.__dict__[name] = value.clone()
