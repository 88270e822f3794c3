"""What backends serve is data; whether they are here is another question; and a choice asks both."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import recfx
from recfx.errors import Diagnostic
from recfx.hashing import HashConfig
from recfx.ir import TableSpec, format_graph
from recfx.ir.context import LookupFacts, OptimizerFacts, TableFacts
from recfx.kernels.build import launch, library, tiling, tuned
from recfx.lowering.registry import BACKENDS, LookupSpec, PlannedTargets
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import RULES

NPU = BACKENDS[3]
RULE = {rule.name: rule for rule in RULES}


def table(dim: int, rows: int = 10) -> TableSpec:
    adopted = HashConfig().resolve(max(rows, 1), adopt=True)
    return TableSpec("t", ("f",), ("f",), rows, dim, "SUM", adopted, 0.0, 0.0)


_OF_TABLE = ("rows", "dtype", "is_contiguous", "optimizer", "is_trained")


def planned(device: str, dim: int = 8, **changes: Any) -> LookupFacts:
    """A lookup of one table, which is nowhere."""
    of_table = {name: changes.pop(name) for name in _OF_TABLE if name in changes}
    facts = TableFacts(**{"rows": 10, "embedding_dim": dim, "dtype": torch.float32, "device": device} | of_table)
    return replace(LookupFacts((table(dim, facts.rows),), "SUM", False, (facts,)), **changes)


def live(
    dtype: torch.dtype = torch.float32,
    optimizer: tuple[str, dict[str, Any]] | None = None,
    size: tuple[int, int] = (10, 8),
    device: str = "cpu",
    contiguous: bool = True,
    weighted: bool = False,
) -> LookupSpec:
    weight = torch.zeros(size, dtype=dtype, device=device)
    weight = weight if contiguous else weight.t().contiguous().t()
    fused = None if optimizer is None else FusedOptimizer(RULE[optimizer[0]], optimizer[1])
    return LookupSpec((table(size[1], size[0]),), "SUM", weighted, [weight], [fused])


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking what is on this machine is an error."""

    def asked(*arguments: object) -> NoReturn:
        raise AssertionError("this machine was asked")

    for module, names in (
        (library, ("load", "why_not")),
        (launch, ("why_not", "refusal", "chip_name", "chip_of")),
        (torch, ("get_device_module", "empty", "zeros")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, asked)


# By backend, in the order of BACKENDS: what it declines, if anything.
SERVED = [
    pytest.param(planned("cpu"), None, "- - - device device -", id="cpu"),
    pytest.param(planned("cuda"), None, "device device - device device -", id="cuda"),
    pytest.param(planned("npu"), None, "device device device not_measured - -", id="npu"),
    pytest.param(planned("npu", 1024), "Ascend910B3", "device device device not_measured - -", id="chip"),
    pytest.param(
        planned("npu"), "Ascend310P3", "device device device no_tiling_table no_tiling_table -", id="other chip"
    ),
    pytest.param(planned("npu", combine="NONE"), None, "device device device not_measured - -", id="rows"),
    pytest.param(planned("npu", rows=2**31), None, "device device device - too_many_rows -", id="npu, many rows"),
    pytest.param(planned("cpu", optimizer=OptimizerFacts("lamb")), None, "- - optimizer device device -", id="lamb"),
    pytest.param(planned("cpu", rows=2**40), None, "- - - device device -", id="many rows"),
    pytest.param(planned("cpu", combine="NONE"), None, "- unsupported_combine - device device -", id="not combined"),
    pytest.param(
        planned("cuda", 1032, dtype=torch.float16), None, "device device too_many_columns device device -", id="1032"
    ),
    pytest.param(planned("cuda", dtype=torch.float64), None, "device device dtype device device -", id="float64"),
    pytest.param(
        planned("npu", is_contiguous=False), None, "device device device not_contiguous not_contiguous -", id="strided"
    ),
]


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(("lookup", "chip", "codes"), SERVED)
def test_what_is_served_follows_from_data_alone(lookup: LookupFacts, chip: str | None, codes: str) -> None:
    assert [code(backend.serves(lookup, chip)) for backend in BACKENDS] == codes.split()


def test_what_has_to_fit_a_chip_is_asked_where_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "chip_named", lambda name: replace(tiling.ASCEND_910B, ub_bytes=4096))
    assert code(NPU.serves(planned("npu", 1024), "small")) == "unified_buffer"
    assert code(NPU.serves(planned("npu", 1024))) == "not_measured"


def code(refusal: Diagnostic | None) -> str:
    return "-" if refusal is None else refusal.code


# What each backend declined when one question was both, with the C++ library and without Triton.
DECLINED = [
    pytest.param(live(), "- - no_triton device device -", id="float32"),
    pytest.param(live(torch.float64), "dtype dtype dtype device device -", id="float64"),
    pytest.param(live(contiguous=False), "not_contiguous not_contiguous not_contiguous device device -", id="strided"),
    pytest.param(live(device="meta"), "device device device device device -", id="meta"),
    pytest.param(live(optimizer=("adam", {"lr": 0.1})), "- - no_triton device device -", id="adam"),
]


@pytest.mark.parametrize(("spec", "codes"), DECLINED)
def test_both_answers_together_are_what_a_backend_declines(
    spec: LookupSpec, codes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "why_not", lambda device: "there is no Triton.")
    for backend, expected in zip(BACKENDS, codes.split(), strict=True):
        declined = backend.decline(spec)
        assert code(declined) == expected
        is_here = expected != "no_triton"
        assert declined == (backend.serves(spec.facts) if is_here else backend.is_here(spec.weights[0].device))


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("lookup", "backend", "chip", "chosen", "declined"),
    [
        (planned("cpu"), "auto", None, "cpu", []),
        (planned("cuda"), "auto", None, "triton[gpu]", [("cpu", "device"), ("fbgemm", "device")]),
        (planned("cuda", dtype=torch.float64), "triton", None, "", [("triton", "dtype")]),
        (planned("npu", rows=2**31), "auto", "Ascend910B1", "npu", [("cpu", "device"), ("fbgemm", "device")]),
        (planned("npu"), "npu", "Ascend910B1", "npu[vendor]", [("npu", "not_measured")]),
        (planned("npu"), "npu[vendor]", None, "npu[vendor]", []),
        (planned("npu", rows=2**31), "npu[vendor]", None, "", [("npu[vendor]", "too_many_rows")]),
        (planned("npu"), "npu", "Ascend950DT", "", [("npu", "no_tiling_table")]),
        (planned("cpu"), "triton", None, "triton", []),
        (planned("cuda"), "triton[gpu]", None, "triton[gpu]", []),
        (planned("cpu"), "triton[gpu]", None, "", []),
        (planned("cpu"), "nobody", None, "", []),
    ],
)  # fmt: skip
def test_a_choice_is_planned_for_machines_that_are_not_there(
    lookup: LookupFacts, backend: str, chip: str | None, chosen: str, declined: list[tuple[str, str]]
) -> None:
    choice = PlannedTargets(backend, chip).serve(lookup, "")
    assert choice.backend == chosen
    assert [(decline.by, decline.code) for decline in choice.declined] == declined
    assert code(choice.finding_declined) == ("-" if chosen == "cpu" else "no_finding_kernel")


def test_what_was_measured_on_a_chip_chooses_the_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECFX_BUILD_DIR", str(tmp_path / "cache"))
    tuned.keep("Ascend910B1", {tuned.VENDOR: {"SUM float32 16": 0, "MEAN float32 16": 1}})
    served = {
        (combine, chip): PlannedTargets("npu", chip).serve(planned("npu", combine=combine), "")
        for combine, chip in product(("SUM", "MEAN", "NONE"), ("Ascend910B1", "Ascend910B3"))
    }
    tuned._kept.cache_clear()
    unmeasured = ("npu[vendor]", ["not_measured"])
    assert {key: (one.backend, list(map(code, one.declined))) for key, one in served.items()} == {
        ("SUM", "Ascend910B1"): ("npu", []),
        ("MEAN", "Ascend910B1"): ("npu[vendor]", ["slower"]),
        ("NONE", "Ascend910B1"): unmeasured,
        **{(combine, "Ascend910B3"): unmeasured for combine in ("SUM", "MEAN", "NONE")},
    }


def test_a_lookup_of_means_does_not_find_rows_itself() -> None:
    assert code(PlannedTargets().serve(planned("cpu", combine="MEAN"), "").finding_declined) == "mean_from_ids"


def test_a_target_that_is_named_for_lookups_does_not_hash() -> None:
    collection = recfx.HashEmbeddingBagCollection([hashed_table()], backend="reference")
    *_, hashed, looked_up, _, _ = format_graph(collection.graph_module).splitlines()
    assert hashed == "ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[t], operators=cpu}"
    assert "kernel=reference" in looked_up


def hashed_table() -> recfx.HashEmbeddingBagConfig:
    return recfx.HashEmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])
