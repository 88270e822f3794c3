"""Operators besides lookups come from targets, by family and device, as lookups do."""

from __future__ import annotations

import copy
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.errors import Diagnostic
from recfx.ir import format_graph
from recfx.kernels.build import launch, library
from recfx.kernels.index import find_rows_op
from recfx.kernels.lookup import bag_offsets, bag_offsets_reference
from recfx.kernels.route import bucketize_op
from recfx.lowering import operators, registry
from recfx.lowering.operators import (
    BAG_OFFSETS,
    BUCKETIZE,
    FAMILIES,
    FIND_ROWS,
    OperatorsByDevice,
    select_operators,
)
from recfx.lowering.registry import Backend

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


def test_the_library_serves_the_cpu() -> None:
    chosen = select_operators(BAG_OFFSETS, CPU)
    assert (chosen.backend, chosen.operators, chosen.declined) == ("cpu", bag_offsets, ())


def test_other_devices_and_hosts_without_the_library_get_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = select_operators(BAG_OFFSETS, ELSEWHERE)
    assert (elsewhere.backend, elsewhere.operators) == ("reference", bag_offsets_reference)
    assert [refusal.code for refusal in elsewhere.declined] == ["device"]
    monkeypatch.setattr(library, "load", lambda: False)
    without = select_operators(BAG_OFFSETS, CPU)
    assert (without.backend, without.operators) == ("reference", bag_offsets_reference)
    assert [refusal.code for refusal in without.declined] == ["no_library"]


def test_a_target_that_is_named_for_lookups_is_not_one_for_operators() -> None:
    collection = recfx.HashEmbeddingBagCollection(
        [recfx.HashEmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])],
        backend="reference",
    )
    *_, hashed, looked_up, _, _ = format_graph(collection.graph_module).splitlines()
    assert hashed == "ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[t], operators=cpu}"
    assert "kernel=reference" in looked_up


def test_the_graph_says_who_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    collection = recfx.HashEmbeddingBagCollection(
        [recfx.HashEmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])]
    )
    assert "hashed=[t], operators=cpu" in format_graph(collection.graph_module)
    monkeypatch.setattr(library, "load", lambda: False)
    assert "hashed=[t], operators=reference" in format_graph(copy.deepcopy(collection).graph_module)
    assert "operators=" not in format_graph(copy.deepcopy(collection).to("meta").graph_module), "nothing runs there"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_its_reference(family: operators.OperatorFamily) -> None:
    assert select_operators(family, ELSEWHERE).backend == "reference"


def test_a_family_that_nobody_has_is_an_error() -> None:
    with pytest.raises(recfx.ConversionError, match="no target has toys") as caught:
        select_operators(operators.OperatorFamily("toys", "plays"), CPU)
    assert caught.value.reason == "backend_unusable"


def test_a_target_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file and one line of the registry: batches are checked, and rows initialised, by the target's operators."""
    called: list[str] = []

    class Toy(ModuleType):
        @staticmethod
        def serves(lookup: object, chip: object) -> Diagnostic:
            return Diagnostic("no_lookups", "", "it has no lookups.", by="toy")

        @staticmethod
        def operators(family: str, device_type: str) -> object | None:
            def checked(*arguments: object) -> object:
                called.append(family)
                return bag_offsets_reference.bag_offsets(*arguments)  # type: ignore[arg-type]

            return SimpleNamespace(bag_offsets=checked) if family == "bag_offsets" else None

    monkeypatch.setitem(sys.modules, "toy_target", Toy("toy_target"))
    targets = (Backend("toy", "toy_target"), *registry.BACKENDS)
    monkeypatch.setattr(registry, "BACKENDS", targets)
    collection = recfx.HashEmbeddingBagCollection(
        [recfx.HashEmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])]
    )
    batch = torch.tensor([1, 2, 3])
    collection(KeyedJaggedTensor(["f"], batch, lengths=torch.tensor([2, 1])))
    assert called == ["bag_offsets"]


def test_choices_are_made_once_and_again_in_copies() -> None:
    chosen = OperatorsByDevice(BAG_OFFSETS)
    assert chosen.chosen(CPU) is chosen.chosen(CPU)
    for other in (copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen))):
        assert other.on(CPU) is bag_offsets


def test_rows_are_found_by_kernels_where_they_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU in Triton's interpreter alone, for which no operator of the library stands in the way."""
    monkeypatch.setattr(launch, "why_not", lambda device: "")
    for device in (torch.device("cuda"), CPU):
        chosen = select_operators(FIND_ROWS, device)
        assert (chosen.backend, chosen.operators) == ("triton", find_rows_op)
    monkeypatch.setattr(launch, "why_not", lambda device: "Triton is not installed.")
    for device in (torch.device("cuda"), CPU):
        chosen = select_operators(FIND_ROWS, device)
        assert chosen.backend == "reference"
        assert [refusal.code for refusal in chosen.declined if refusal.by == "triton"] == ["no_triton"]


def test_ids_are_routed_by_kernels_where_they_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(launch, "why_not", lambda device: "")
    chosen = select_operators(BUCKETIZE, cuda)
    assert (chosen.backend, chosen.operators) == ("triton", bucketize_op)
    assert select_operators(BAG_OFFSETS, cuda).backend == "reference"
    assert select_operators(BUCKETIZE, CPU).backend == "cpu"
    monkeypatch.setattr(launch, "why_not", lambda device: "Triton is not installed.")
    without = select_operators(BUCKETIZE, cuda)
    assert without.backend == "reference"
    assert ("no_triton", "triton") in [(refusal.code, refusal.by) for refusal in without.declined]
