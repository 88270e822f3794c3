"""One small collection, and its graph after each pass."""

from dataclasses import replace

from torch import fx
from torchrec import EmbeddingBagConfig, PoolingType

from recfx import HashConfig, HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.collections.compile_graph import REWRITING_KEY
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.printer import format_graph
from recfx.lowering.registry import TargetsHere
from recfx.passes import passes
from recfx.passes.base import Rewrite, Rewriting, run_passes
from recfx.runtime.lower_graph import lower_graph, module_of
from recfx.runtime.lowered import Runtime

ADOPTED = HashConfig(dense_rows=8)
INDEXED = HashConfig(dense_rows=0)


def table(name: str, hashing: HashConfig, *features: str, mean: bool = False) -> EmbeddingBagConfig:
    """A table of 8 rows, whose only feature has its name unless others are given."""
    return HashEmbeddingBagConfig(
        name=name,
        num_embeddings=8,
        embedding_dim=4,
        feature_names=list(features or [name]),
        pooling=PoolingType.MEAN if mean else PoolingType.SUM,
        hashing=hashing,
    )


def collection(first: HashConfig, second: HashConfig) -> HashEmbeddingBagCollection:
    """Table ``users`` (MEAN, two features) and table ``ads`` (SUM)."""
    return HashEmbeddingBagCollection([table("users", first, "user", "friend", mean=True), table("ads", second, "ad")])


def until(name: str) -> list[Rewrite]:
    """The passes up to this one."""
    names = [pass_.name for pass_ in passes()]
    return list(passes()[: names.index(name) + 1])


def unexpanded(converted: HashEmbeddingBagCollection, backend: str = "auto") -> OperatorGraph:
    """The graph before the first pass, for this backend."""
    graph = converted.unexpanded_graph()
    return OperatorGraph(graph.graph, replace(graph.context, targets=TargetsHere(backend)))


def rewritten(converted: HashEmbeddingBagCollection, name: str, backend: str = "auto") -> Rewriting:
    """What the passes up to this one make."""
    return run_passes(unexpanded(converted, backend), until(name))


def lowered(converted: HashEmbeddingBagCollection, rewrites: list[Rewrite], backend: str = "auto") -> fx.GraphModule:
    """What the passes make, lowered."""
    made = run_passes(unexpanded(converted, backend), rewrites)
    graph_module = lower_graph(made.graph, made.metas, module_of, Runtime(converted._store), backend)
    graph_module.meta[REWRITING_KEY] = made
    return graph_module


def after(name: str, converted: HashEmbeddingBagCollection) -> tuple[OperatorGraph, str, bool, list[str]]:
    """The graph after a pass, its text, whether that pass changed it, and reasons that it declined for."""
    made = rewritten(converted, name)
    last = made.records[-1]
    assert last.name == name
    return made.graph, format_graph(made.graph), last.modified, [declined.code for declined in last.declined]


def node(graph: OperatorGraph, name: str) -> fx.Node:
    (node_named,) = [candidate for candidate in graph.graph.nodes if candidate.name == name]
    return node_named
