"""The passes that make graphs for files, as text: frozen indexes, stored rows, and one operator for both."""

from dataclasses import dataclass, replace

import pytest
import torch

from recfx import HashConfig, HashEmbeddingBagCollection
from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts, Served
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.printer import format_graph
from recfx.passes import export_passes, passes, serving_passes
from recfx.passes.base import Rewriting, run_passes
from tests.passes.small_collection import ADOPTED, INDEXED, collection, table

EVICTS = HashConfig(dense_rows=0, on_full="evict")


@dataclass(frozen=True)
class Files:
    """A target of files: its operators, and the tables for which it has one that finds ids and pools their rows."""

    fuses: tuple[str, ...] = ()

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        is_fused = all(table.name in self.fuses for table in lookup.tables)
        dtypes = "_".join(str(table.dtype).removeprefix("torch.") for table in lookup.tables)
        return Served(
            f"of_{dtypes}", (), None if is_fused else Diagnostic("no_finding_kernel", "", "none.", by="files")
        )

    def find_rows(self, device: str) -> Served:
        return Served("of_files")

    def index_operators(self, device: str) -> str:
        return ""


def made_by(targets: Files, first: HashConfig, second: HashConfig, **dtypes: torch.dtype) -> Rewriting:
    """What the passes make."""
    graph = collection(first, second).unexpanded_graph()
    graph = OperatorGraph(graph.graph, replace(graph.context, targets=targets))
    return run_passes(graph, [*export_passes(), *serving_passes({"": dtypes})])


def served(first: HashConfig, second: HashConfig, *, fuses: bool = False, **dtypes: torch.dtype) -> str:
    """The text after the passes."""
    made = made_by(Files(("users", "ads") if fuses else ()), first, second, **dtypes)
    text = format_graph(made.graph)
    return "\n".join(line for line in text.splitlines() if "lookup" in line or "find" in line or "divide" in line)


def test_export_passes_leave_out_what_files_have_no_use_for() -> None:
    names = [pass_.name for pass_ in export_passes()]
    assert names == ["expand_collection", "insert_hash", "elide_hash", "batch_lookups"]
    assert set(export_passes()) < set(passes())


@pytest.mark.parametrize("config", [INDEXED, EVICTS])
def test_ids_are_found_and_nothing_is_in_flight(config: HashConfig) -> None:
    assert (
        served(config, config)
        == """\
ebc_find_rows = find_rows(ebc_select_features) {hashed=[users, ads], frozen}
ebc_lookup = lookup(ebc_find_rows) {tables=[users, ads], combine=SUM, dtype=float32, kernel=of_float32_float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)"""
    )


def test_a_mean_of_hashed_tables_alone_is_a_mean_again() -> None:
    tables = [table(name, INDEXED, mean=True) for name in ("t0", "t1")]
    before = HashEmbeddingBagCollection(tables).unexpanded_graph()
    made = run_passes(OperatorGraph(before.graph, replace(before.context, targets=Files())), export_passes())
    assert "combine=SUM" in format_graph(made.graph)
    assert "mean_divide" in format_graph(made.graph)
    text = format_graph(run_passes(made, serving_passes({"": {}})).graph)
    assert "combine=MEAN" in text
    assert "ebc_keyed_tensor = keyed_tensor(ebc_lookup)" in text
    assert "mean_divide" not in text


def test_a_lookup_that_pools_a_sum_as_well_stays_a_sum() -> None:
    assert (
        served(INDEXED, ADOPTED, users=torch.float16)
        == """\
ebc_find_rows = find_rows(ebc_select_features) {hashed=[users], frozen}
ebc_lookup = lookup(ebc_find_rows) {tables=[users, ads], combine=SUM, \
stored=[torch.float16, torch.float32], kernel=of_float16_float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)"""
    )


@pytest.mark.parametrize("config", [INDEXED, EVICTS])
def test_one_operator_finds_and_pools(config: HashConfig) -> None:
    assert (
        served(config, config, fuses=True)
        == """\
ebc_hash_lookup = hash_lookup(ebc_select_features) {hashed=[users, ads], frozen, tables=[users, ads], combine=SUM, \
dtype=float32, kernel=of_float32_float32}
ebc_mean_divide = mean_divide(ebc_hash_lookup, ebc_select_features) {divided=[users]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)"""
    )


def test_without_an_index_there_is_nothing_to_find() -> None:
    assert "find_rows" not in served(ADOPTED, ADOPTED)
    text = served(ADOPTED, ADOPTED, fuses=True)
    assert "ebc_hash_lookup = hash_lookup(ebc_select_features) {tables=[users], combine=MEAN" in text
    assert "ebc_hash_lookup_1 = hash_lookup(ebc_select_features) {tables=[ads], combine=SUM" in text


def test_lookups_that_share_rows_are_fused_together_or_not_at_all() -> None:
    """The pass says which of them no operator finds and pools."""
    made = made_by(Files(("ads",)), ADOPTED, INDEXED)
    (record,) = [record for record in made.records if record.name == "fuse_served_lookup"]
    (of_users,) = [node.name for node in made.graph.of_kind("lookup") if node.kwargs["tables"] == ("users",)]
    assert [(why.code, why.node, why.by) for why in record.declined] == [("no_finding_kernel", of_users, "files")]
    assert not made.graph.of_kind("hash_lookup")
