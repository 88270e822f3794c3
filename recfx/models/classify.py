"""What the conversion does with a module: one rule per kind of collection, with a reason code and what to do.

Classes are identified by the class object, never by name (except inside a ScriptModule, where only the name is left).
"""

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import KINDS, standard_kind
from recfx.collections.replaced import REPLACED, is_replaced
from recfx.collections.sharding.collection import sharded_collections
from recfx.errors import Diagnostic, Severity
from recfx.ir.meta import SourceLocation
from recfx.ir.tables import IdRange

CONVERTIBLE, CONVERTED, KEPT, REFUSED = "convertible", "converted", "kept", "refused"
SHARDED_BY_TORCHREC = "sharded_by_torchrec"  # kept
_TAKE_OVER = "managed_collisions='convert': ids that have learned rows keep them."


@dataclass
class Finding:
    """One collection of the model."""

    module: nn.Module
    paths: list[str]  # every fully qualified name it has; the first is the one used in names
    status: str  # ``convertible``, ``converted`` (already), ``kept`` or ``refused``
    why: Diagnostic | None = None  # why it is kept or refused; None if it is neither
    found: str = "walked"  # ``traced``, ``walked`` or ``never called``
    source: SourceLocation | None = None  # the line that calls it, or the class that holds it
    call_sites: tuple[SourceLocation, ...] = ()  # all lines that were seen to call it, in the order of the calls
    calls: int = 0  # how often one forward calls it, as far as the trace can see
    id_ranges: dict[str, IdRange] = field(default_factory=dict)  # that its ids are declared to be in, by feature
    learned: dict[str, Any] = field(default_factory=dict)  # by table, if managed collisions are taken over

    def refuse(self, why: Diagnostic) -> None:
        self.status, self.why = REFUSED, replace(why, path=self.path)

    @property
    def reason(self) -> str:
        return "" if self.why is None else self.why.code

    @property
    def path(self) -> str:
        return self.paths[0]


def classify(module: nn.Module, path: str) -> Finding | None:
    """The finding for ``module`` if it is a collection or holds one that cannot be reached; otherwise None."""

    def refused(reason: str, message: str, what_to_do: str) -> Finding:
        return Finding(module, [path], REFUSED, Diagnostic(reason, path, message, what_to_do, Severity.ERROR))

    def kept(reason: str, message: str, what_to_do: str = "") -> Finding:
        return Finding(module, [path], KEPT, Diagnostic(reason, path, message, what_to_do))

    name = type(module).__name__
    if isinstance(module, ConvertedCollection):
        return Finding(module, [path], CONVERTED)
    if isinstance(module, DistributedModelParallel) and sharded_collections(module):
        return None  # it holds collections that were converted first
    if isinstance(module, ShardedEmbeddingCollection):
        return kept(SHARDED_BY_TORCHREC, "TorchRec has already sharded this EmbeddingCollection; it works as before.")
    if isinstance(module, (DistributedModelParallel, ShardedModule)):
        advice = "convert the model before it is wrapped in DistributedModelParallel."
        return refused("distributed_model_parallel", f"{name} has already sharded its collections.", advice)
    if isinstance(module, torch.jit.ScriptModule):
        advice = "convert the Python model instead, and call recfx.export for TorchScript."
        message = "a ScriptModule holds a collection; its code can no longer be rewritten."
        return refused("script_module", message, advice) if _scripts_a_collection(module) else None
    if isinstance(module, fx.GraphModule) and (node := _inlined_table(module)) is not None:
        advice = "convert before tracing, or trace with the collection as a leaf."
        return refused("inlined_collection", f"a collection was traced into this graph ({node.target}).", advice)
    if isinstance(module, ManagedCollisionEmbeddingCollection):
        message = f"{name} is not pooled, and remaps ids by itself; it works as before. The model and its conversion "
        message += "share its state and its mode."
        return kept("managed_collision", message, "nothing, if this is intended; to convert it, pass " + _TAKE_OVER)
    if isinstance(module, BaseManagedCollisionEmbeddingCollection):
        message = f"{name} remaps ids by itself, and hashing remapped ids would hash twice."
        advice = "keep it with on_unsupported='keep': the model and its conversion then share its state and its mode; "
        return refused("managed_collision", message, f"{advice}or convert it with {_TAKE_OVER}")
    if isinstance(module, (QuantEmbeddingBagCollection, QuantEmbeddingCollection)):
        advice = "convert the float model; recfx.export(..., quantize=) quantizes what it writes."
        return refused("quantized_collection", "a quantized collection cannot be trained or re-indexed.", advice)
    if isinstance(module, (FusedEmbeddingBagCollection, FusedEmbeddingCollection)):
        advice = f"use {name.removeprefix('Fused')} with apply_optimizer_in_backward; recfx fuses the optimizer."
        return refused("fused_collection", f"{name} keeps its tables in its own kernels.", advice)
    if (kind := standard_kind(module)) is not None:
        if is_replaced(module):
            advice = "convert the model that holds the converted one, or recfx.unconvert that model first."
            return refused(REPLACED, "it has been replaced by a converted collection, in place.", advice)
        if type(module).forward is not kind.standard.forward or "forward" in module.__dict__:
            advice = "move the extra work out of forward, or keep it with on_unsupported='keep'."
            return refused("own_forward", f"{name} has its own forward, which a conversion would drop.", advice)
        if not kind.configs_of(module):
            return kept("no_tables", "the collection has no tables.")
        return Finding(module, [path], CONVERTIBLE)
    for kind in KINDS:
        if isinstance(module, kind.interface):
            message = f"{name} implements {kind.interface.__name__} in a way that recfx does not know."
            advice = f"use torchrec.{kind.standard.__name__}, or keep it with on_unsupported='keep'."
            return refused("unknown_collection", message, advice)
    return None


def _scripts_a_collection(module: torch.jit.ScriptModule) -> bool:
    scripted: list[Any] = [child for child in module.modules() if isinstance(child, torch.jit.ScriptModule)]
    names = [str(child._c._type().qualified_name()) for child in scripted]
    standard = {kind.standard.__name__ for kind in KINDS}
    return any("torchrec" in name and name.split(".")[-1] in standard for name in names)


def _inlined_table(module: fx.GraphModule) -> fx.Node | None:
    """A call of one table's module, which is what is left of a collection that was traced into a graph."""
    holders = {kind.tables: kind.holder for kind in KINDS}
    for node in module.graph.nodes:
        for name in str(node.target).split(".")[:-1] if node.op == "call_module" else ():
            with contextlib.suppress(AttributeError):
                if name in holders and isinstance(module.get_submodule(str(node.target)), holders[name]):
                    return node
    return None
