"""The node vocabulary: one meaning, one name, in code, graph, report, profiler ranges and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeKind:
    """One word of the vocabulary.

    Args:
        name: the word; a node is printed as ``<collection fqn>_<name>``.
        takes: types of the node's inputs, as text.
        gives: type of its output, as text.
        meaning: one sentence.
    """

    name: str
    takes: str
    gives: str
    meaning: str


VOCABULARY: dict[str, NodeKind] = {
    kind.name: kind
    for kind in (
        NodeKind("collection", "KJT", "KT", "a collection that has not been expanded yet"),
        NodeKind(
            "select_features",
            "KJT",
            "KJT",
            "keys to the collection's order, by name; unknown keys dropped, a missing key is an error",
        ),
        NodeKind("bucketize", "KJT", "KJT", "row-wise routing: each id to the rank that owns its row or bucket"),
        NodeKind("input_dist_start", "KJT", "KJT + DistContext", "all-to-all of ids, started"),
        NodeKind("input_dist_wait", "KJT + DistContext", "KJT", "all-to-all of ids, waited for"),
        NodeKind(
            "hash_ids", "KJT of raw ids", "KJT of rows", "the tables' index: find or insert in training, find in eval"
        ),
        NodeKind("lookup", "KJT of rows", "[B, sum D]", "one table-batched pooled lookup per group of tables"),
        NodeKind("output_dist_start", "[B', D']", "[B, D]", "all-to-all or reduce-scatter of pooled rows, started"),
        NodeKind("output_dist_wait", "[B', D']", "[B, D]", "all-to-all or reduce-scatter of pooled rows, waited for"),
        NodeKind(
            "mean_divide",
            "[B, sum D], KJT",
            "[B, sum D]",
            "features that are MEAN and whose lookup ran as SUM, divided by max(length, 1)",
        ),
        NodeKind("keyed_tensor", "[B, sum D], ...", "KT", "TorchRec's output type, in the unsharded key order"),
    )
}
