import pytest
import torch

from recfx import ConversionError
from recfx.passes import passes, run_passes
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection


def test_float32_tables_on_the_cpu_get_the_table_batched_kernel() -> None:
    graph_module, _, _, declined = after("lower", collection(INDEXED, INDEXED))
    (lookup,) = [node for node in graph_module.graph.nodes if node.name == "ebc_hash_lookup"]
    assert lookup.meta["recfx"].kernel == "cpu"
    assert declined == []


def test_float64_falls_back_to_the_reference_and_says_why() -> None:
    converted = collection(ADOPTED, ADOPTED).to(torch.float64)
    graph_module, _, _, declined = after("lower", converted)
    kernels = {node.meta["recfx"].kernel for node in graph_module.graph.nodes if "lookup" in node.name}
    assert kernels == {"reference"}
    assert declined == ["dtype"] * 4  # cpu and fbgemm, for each of the two lookups


def test_a_backend_named_by_the_user_is_used_or_is_an_error() -> None:
    converted = collection(ADOPTED, ADOPTED)
    graph_module = converted.unexpanded_graph()
    run_passes(graph_module, passes(backend="reference"))
    assert {node.meta["recfx"].kernel for node in graph_module.graph.nodes if "lookup" in node.name} == {"reference"}
    with pytest.raises(ConversionError, match="bfloat16") as caught:
        run_passes(converted.to(torch.bfloat16).unexpanded_graph(), passes(backend="fbgemm"))
    assert caught.value.reason == "backend_unusable"
    with pytest.raises(ConversionError, match="'cuda_magic'") as caught:
        run_passes(collection(ADOPTED, ADOPTED).unexpanded_graph(), passes(backend="cuda_magic"))
    assert caught.value.reason == "unknown_backend"


def test_the_printed_graph_says_which_kernel_was_chosen() -> None:
    _, before, _, _ = after("fuse_hash_lookup", collection(INDEXED, INDEXED))
    _, lowered, _, _ = after("lower", collection(INDEXED, INDEXED))
    assert "{hashed=[users, ads], operators=cpu, tables=[users, ads], pooling=SUM, dtype=float32}" in before
    assert (
        "{hashed=[users, ads], operators=cpu, tables=[users, ads], pooling=SUM, dtype=float32, kernel=cpu}" in lowered
    )
