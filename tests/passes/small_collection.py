"""One small collection, and its graph after each pass."""

from __future__ import annotations

from torch import fx
from torchrec import EmbeddingBagConfig, PoolingType

from recfx import HashConfig, HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.ir import format_graph
from recfx.passes import passes, run_passes

ADOPTED = HashConfig(dense_rows=8)
INDEXED = HashConfig(dense_rows=0)


def collection(first: HashConfig, second: HashConfig) -> HashEmbeddingBagCollection:
    """Table ``users`` (MEAN, two features) and table ``ads`` (SUM), 8 rows each."""
    tables: list[EmbeddingBagConfig] = [
        HashEmbeddingBagConfig(
            name="users",
            num_embeddings=8,
            embedding_dim=4,
            feature_names=["user", "friend"],
            pooling=PoolingType.MEAN,
            hashing=first,
        ),
        HashEmbeddingBagConfig(name="ads", num_embeddings=8, embedding_dim=4, feature_names=["ad"], hashing=second),
    ]
    return HashEmbeddingBagCollection(tables)


def after(name: str, converted: HashEmbeddingBagCollection) -> tuple[fx.GraphModule, str, bool, list[str]]:
    """Run the pipeline up to pass ``name``: graph, its text, whether that pass changed it, reasons it declined for."""
    graph_module = converted.unexpanded_graph()
    pipeline = []
    for rewrite in passes():
        pipeline.append(rewrite)
        if rewrite.name == name:
            break
    last = run_passes(graph_module, pipeline)[-1]
    assert last.name == name
    return graph_module, format_graph(graph_module), last.modified, [declined.code for declined in last.declined]
