"""Find every collection of a model, say what can be converted, and why the rest cannot.

The module walk finds them all, under every name that they have; with a sample, a shallow trace confirms where each is
called. Classes are told apart by identity, never by name (except inside a ScriptModule, where nothing else is left).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

from recfx.collection import HashEmbeddingBagCollection
from recfx.errors import ConversionError
from recfx.ir.meta import SourceLocation
from recfx.sample import Sample
from recfx.shells import copy_shells
from recfx.tracing import Rollback, ShallowTracer, rollback_of, source_of, trace_graph

CONVERTIBLE, CONVERTED, KEPT, REFUSED = "convertible", "converted", "kept", "refused"


@dataclass
class Finding:
    """One collection of the model.

    Args:
        module: the collection.
        paths: every fully qualified name it has; the first is the one used in names.
        status: ``convertible``, ``converted`` (already), ``kept`` or ``refused``.
        reason: reason code of what is kept or refused.
        message: why.
        what_to_do: what the user can change.
        found: ``traced``, ``walked`` or ``never called``.
        source: the line that calls it, or the class that holds it.
        calls: how often one forward calls it, as far as the trace sees.
    """

    module: nn.Module
    paths: list[str]
    status: str
    reason: str = ""
    message: str = ""
    what_to_do: str = ""
    found: str = "walked"
    source: SourceLocation | None = None
    calls: int = 0

    def refuse(self, error: ConversionError) -> None:
        """Note that the tables of a convertible collection cannot be converted."""
        self.status, self.reason = REFUSED, error.reason
        self.message, self.what_to_do = error.message, error.what_to_do

    @property
    def path(self) -> str:
        """The name used in graph, report and messages."""
        return self.paths[0]


@dataclass
class Discovery:
    """All collections of a model, and what the trace could not enter."""

    findings: list[Finding]
    rollbacks: list[Rollback] = field(default_factory=list)

    def of(self, status: str) -> list[Finding]:
        """The findings of one status."""
        return [finding for finding in self.findings if finding.status == status]


def check_module(model: object) -> None:
    """Refuse what is no module.

    Raises:
        ConversionError: ``invalid_argument``.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(
            f"model is a {type(model).__name__}.",
            reason="invalid_argument",
            what_to_do="pass the torch.nn.Module that holds the collections.",
        )


def discover(model: nn.Module, sample: Sample | None = None) -> Discovery:
    """Find the collections of ``model``; changes nothing.

    Args:
        model: any module.
        sample: a call of it; without one nothing is traced.
    """
    found: dict[int, Finding] = {}
    _walk(model, "", None, found, set())
    discovery = Discovery(list(found.values()))
    if sample is not None:
        _confirm_by_trace(model, sample, discovery)
    return discovery


def _walk(
    module: nn.Module, path: str, parent: nn.Module | None, found: dict[int, Finding], ancestors: set[int]
) -> None:
    if id(module) in found:
        found[id(module)].paths.append(path)
        return
    finding = _classify(module, path)
    if finding is not None:
        finding.source = _class_location(module if parent is None else parent)
        found[id(module)] = finding
        return
    if id(module) in ancestors or isinstance(module, torch.jit.ScriptModule):
        return
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, f"{path}.{name}" if path else name, module, found, ancestors | {id(module)})


def _classify(module: nn.Module, path: str) -> Finding | None:
    """What ``module`` is, if it is a collection or holds one that cannot be reached."""

    def refused(reason: str, message: str, what_to_do: str) -> Finding:
        return Finding(module, [path], REFUSED, reason, message, what_to_do)

    def kept(reason: str, message: str, what_to_do: str = "") -> Finding:
        return Finding(module, [path], KEPT, reason, message, what_to_do)

    if isinstance(module, HashEmbeddingBagCollection):
        return Finding(module, [path], CONVERTED)
    if isinstance(module, (DistributedModelParallel, ShardedModule)):
        return refused(
            "distributed_model_parallel",
            f"{type(module).__name__} has sharded its collections already.",
            "convert the model before it is wrapped in DistributedModelParallel.",
        )
    if isinstance(module, torch.jit.ScriptModule):
        if not _scripts_a_collection(module):
            return None
        return refused(
            "script_module",
            "a ScriptModule holds a collection; its code can no longer be rewritten.",
            "convert the Python model, then export it.",
        )
    if isinstance(module, fx.GraphModule) and (node := _inlined_bag(module)) is not None:
        return refused(
            "inlined_collection",
            f"a collection was traced into this graph ({node.target}).",
            "convert before tracing, or trace with EmbeddingBagCollection as a leaf.",
        )
    if isinstance(module, BaseManagedCollisionEmbeddingCollection):
        return refused(
            "managed_collision",
            f"{type(module).__name__} remaps ids by itself, and hashing remapped ids would hash twice.",
            "use the inner EmbeddingBagCollection with HashConfig(dense_rows=0) instead.",
        )
    if isinstance(module, QuantEmbeddingBagCollection):
        return refused(
            "quantized_collection",
            "a quantized collection cannot be trained or re-indexed.",
            "convert the float model, then export it with quantize=.",
        )
    if isinstance(module, FusedEmbeddingBagCollection):
        return refused(
            "fused_collection",
            "FusedEmbeddingBagCollection keeps its tables in kernels of its own.",
            "use EmbeddingBagCollection with apply_optimizer_in_backward; recfx fuses the optimizer.",
        )
    if isinstance(module, EmbeddingBagCollection):
        if type(module).forward is not EmbeddingBagCollection.forward or "forward" in module.__dict__:
            return refused(
                "own_forward",
                f"{type(module).__name__} has a forward of its own, which a conversion would drop.",
                "move the extra work out of forward, or keep it with on_unsupported='keep'.",
            )
        if not module.embedding_bag_configs():
            return kept("no_tables", "the collection has no tables.")
        return Finding(module, [path], CONVERTIBLE)
    if isinstance(module, EmbeddingBagCollectionInterface):
        return refused(
            "unknown_collection",
            f"{type(module).__name__} implements EmbeddingBagCollectionInterface in a way that recfx does not know.",
            "use torchrec.EmbeddingBagCollection, or keep it with on_unsupported='keep'.",
        )
    if isinstance(module, EmbeddingCollectionInterface):
        return kept("embedding_collection", f"{type(module).__name__} is not pooled; it works as before.")
    return None


def _scripts_a_collection(module: torch.jit.ScriptModule) -> bool:
    scripted: list[Any] = [child for child in module.modules() if isinstance(child, torch.jit.ScriptModule)]
    names = [str(child._c._type().qualified_name()) for child in scripted]
    return any("torchrec" in name and name.split(".")[-1] == "EmbeddingBagCollection" for name in names)


def _inlined_bag(module: fx.GraphModule) -> fx.Node | None:
    """A call of one table's bag: what is left of a collection that was traced into a graph."""
    for node in module.graph.nodes:
        if node.op == "call_module" and "embedding_bags" in str(node.target).split(".")[:-1]:
            try:
                if isinstance(module.get_submodule(str(node.target)), nn.EmbeddingBag):
                    return node
            except AttributeError:
                continue
    return None


def _class_location(module: nn.Module) -> SourceLocation | None:
    try:
        file = inspect.getsourcefile(type(module))
        _, line = inspect.getsourcelines(type(module))
    except (OSError, TypeError):  # classes made in a shell or by exec have no source
        return None
    return None if file is None else SourceLocation(file, line)


def _confirm_by_trace(model: nn.Module, sample: Sample, discovery: Discovery) -> None:
    """Trace a copy of the module shells in both modes; mark where each collection is called."""
    wanted = {id(finding.module): finding for finding in discovery.findings}
    itself = wanted.get(id(unwrap(model)))
    if itself is not None:  # calling the model is calling the collection
        itself.found = "traced"
        return
    called: set[int] = set()
    hidden: set[int] = set()
    seen: set[tuple[str, str]] = set()
    for training in (True, False):
        root, copies = copy_shells(unwrap(model))
        set_mode(root, training)
        _own_tensor_attributes(root)
        leaves = {id(copies[key]): key for key in wanted if key in copies}
        tracer = ShallowTracer(set(leaves))
        try:
            graph = trace_graph(root, sample, tracer)
        except Exception as error:  # user code on proxies; the reason goes into the report
            tracer.rollbacks.append(rollback_of("", error))
            hidden |= set(wanted)
            graph = fx.Graph()
        counts: dict[int, int] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                module = root.get_submodule(str(node.target))
                if id(module) in leaves:
                    counts[leaves[id(module)]] = counts.get(leaves[id(module)], 0) + 1
                    finding = wanted[leaves[id(module)]]
                    called.add(id(finding.module))
                    finding.source = source_of(node) or finding.source
        for key, count in counts.items():
            wanted[key].calls = max(wanted[key].calls, count)
        for rollback in tracer.rollbacks:
            if rollback.module_path:
                inside = root.get_submodule(rollback.module_path)
                hidden |= {leaves[id(child)] for child in inside.modules() if id(child) in leaves}
            if (rollback.module_path, rollback.message) not in seen:
                seen.add((rollback.module_path, rollback.message))
                discovery.rollbacks.append(rollback)
    for key, finding in wanted.items():
        finding.found = "traced" if key in called else "walked" if key in hidden else "never called"


def set_mode(root: nn.Module, training: bool) -> None:
    """As ``root.train(training)``, but leaves ScriptModules alone: shells share them with the user's model."""
    for module in root.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.training = training


def _own_tensor_attributes(root: nn.Module) -> None:
    """Plain tensor attributes are no proxies: code that changes them in place must not reach the user's."""
    for module in root.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                module.__dict__[name] = value.clone()


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner: Any = model.module
        else:
            inner = model._modules.get("_orig_mod") if isinstance(model, OptimizedModule) else None
        if inner is None:
            return model
        model = inner
