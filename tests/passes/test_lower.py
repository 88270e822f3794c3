import torch

from tests.passes.small_collection import ADOPTED, INDEXED, after, collection, node, rewritten
from tests.support.refusals import refused


def test_float32_tables_on_the_cpu_get_the_table_batched_kernel() -> None:
    graph, _, _, declined = after("lower", collection(INDEXED, INDEXED))
    assert node(graph, "ebc_hash_lookup").kwargs["kernel"] == "cpu"
    assert declined == []


def test_float64_falls_back_to_the_reference_and_says_why() -> None:
    converted = collection(ADOPTED, ADOPTED).to(torch.float64)
    graph, _, _, declined = after("lower", converted)
    assert {lookup.kwargs["kernel"] for lookup in graph.of_kind("lookup")} == {"reference"}
    assert declined == ["dtype"] * 4  # cpu and fbgemm, for each of the two lookups


def test_a_backend_named_by_the_user_is_used_or_is_an_error() -> None:
    converted = collection(ADOPTED, ADOPTED)
    graph = rewritten(converted, "lower", "reference").graph
    assert {lookup.kwargs["kernel"] for lookup in graph.of_kind("lookup")} == {"reference"}
    with refused("backend_unusable", match="bfloat16"):
        rewritten(converted.to(torch.bfloat16), "lower", "fbgemm")
    with refused("unknown_backend", match="'cuda_magic'"):
        rewritten(collection(ADOPTED, ADOPTED), "lower", "cuda_magic")
