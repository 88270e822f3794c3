"""The heat map of tables by rank, and links to what a page shows."""

from pathlib import Path

import pytest
from torch import nn
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx.planner.pricing.hardware import CPU_HOST
from tests.drawing import picture
from tests.drawing.open_page import opened, shown_costs, tables, texts
from tests.support.browser import Page
from tests.support.fake_group import fake_group


def test_tables_of_every_rank_are_those_of_its_cost(page: Page, tmp_path: Path) -> None:
    with fake_group(3, picture.RANKS):
        model = picture.sharded()
        opened(page, model, tmp_path)
        priced = recfx.cost(model, CPU_HOST).at()
    dense = sum(node.resident_bytes for node in priced.nodes if node.kind == "dense")
    assert page.run("state.rank") == 3
    kept = {}
    for rank in range(picture.RANKS):
        page.run(f"byId('rank').value = {rank}, byId('rank').dispatchEvent(new Event('input'))")
        cost = shown_costs(page)
        kept[rank] = cost["bytes that stay in memory"]
        assert kept[rank] == priced.ranks[rank].resident_bytes - dense
        assert texts(page, "#details-title") == [f"Rank {rank}: {4 if rank == 0 else 2} shards"]
        if rank == priced.rank:
            (lookup,) = (node for node in priced.nodes if node.kind == "hash_lookup")
            rows = 8 * 2 * 512  # bytes of rows found, which one node need not write out and read again
            assert cost["bytes read"] == pytest.approx(lookup.read_bytes + rows)
            assert cost["bytes written"] == pytest.approx(lookup.written_bytes + rows)
    page.run("byId('colour').value = 'kept', byId('colour').dispatchEvent(new Event('change'))")
    over = max(kept.values()) * len(kept) / sum(kept.values())
    (summary,) = texts(page, "#ranks-summary")
    assert summary.startswith("bytes in memory: rank 0 has most, ")
    assert summary.endswith(f", {over:.2f} times the mean")
    assert page.complaints == []


def test_a_click_on_the_map_chooses_a_rank(page: Page, tmp_path: Path) -> None:
    model = nn.ModuleDict({"ebc": tables(0, 4)})
    placed = {"t0": table_wise(rank=0), "t1": table_wise(rank=1), "t2": table_wise(rank=3), "t3": row_wise()}
    plan = construct_module_sharding_plan(model["ebc"], placed, local_size=4, world_size=4, device_type="cpu")
    recfx.draw(model, tmp_path / "model.html", plan=ShardingPlan({"ebc": plan}), world_size=4)
    page.open(tmp_path / "model.html")
    assert page.run("byId('heat').clientWidth > 100")
    assert texts(page, "#heat-scale")[0].startswith("a table: 0 to ")
    for rank, names in ((3, {"t2", "t3"}), (1, {"t1", "t3"}), (2, {"t3"})):
        place = f"map.left + {rank + 0.5} * map.column"
        page.run(
            "(({ x, y }) => byId('heat').dispatchEvent(new MouseEvent('click', "
            f"{{ clientX: x + {place}, clientY: y + SUMS + 3 }})))(byId('heat').getBoundingClientRect())"
        )
        assert page.run("byId('rank').value") == str(rank)
        assert set(texts(page, "#details-body .scroll tbody td:first-child")) == names
        assert page.run("[state.selected, ...state.found]") == [None, "ebc/ebc_lookup_1"]  # rank 0 has a part of t3
    cell = "cellText({ rank: 2, row: map.rows.find(({ label }) => label === 't0') })"
    assert page.run(cell) == "t0 is not on rank 2"
    page.click("#details-body .scroll .link")  # its table in the graph of rank 0
    assert texts(page, "#details-title") == ["ebc_lookup_1"]
    assert page.complaints == []
