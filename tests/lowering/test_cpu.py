"""Target ``cpu`` from raw ids, against target ``reference`` on the rows that the index gives."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from recfx.errors import InputError
from recfx.hashing import HashConfig, HashIndex
from recfx.ir import TableSpec
from recfx.kernels.build import library
from recfx.kernels.index.index_buffers import IndexView
from recfx.lowering import cpu, reference
from recfx.lowering.registry import BACKENDS, LookupBatch, LookupSpec, select_backend
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import RULES

ROWS, DIMS = (60, 40, 50), (8, 20, 5)
HASHED = (0, 2)  # table 1 is adopted
BATCH = 6
RULE = {rule.name: rule for rule in RULES}
(CPU,) = (backend for backend in BACKENDS if backend.name == "cpu")


def tables() -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(
            f"t{number}",
            (f"f{number}",),
            (f"f{number}",),
            rows,
            dim,
            "SUM",
            HashConfig().resolve(rows, adopt=True),
            0.0,
            0.0,
        )
        for number, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True))
    )


@dataclass
class Indexes:
    """Indexes behind a lookup; what the policy answers is the test's choice.

    Args:
        training: as in ``IdsToRows``.
        share: eval answers absent ids with shared rows.
        never: ids that training gives no row: they read zeros.
    """

    training: bool
    weights: list[torch.Tensor]
    share: bool = False
    never: tuple[int, ...] = ()
    indexes: dict[int, HashIndex] = field(default_factory=dict)
    told: list[list[int]] = field(default_factory=list)
    inserts: int = 0

    def __post_init__(self) -> None:
        for table in HASHED:
            self.indexes[table] = HashIndex(ROWS[table], config=HashConfig(buckets=2))
            self.indexes[table].find_or_insert(torch.tensor([-1, *range(100, 120)]))

    def find_views(self) -> list[IndexView | None]:
        views: list[IndexView | None] = [None] * len(ROWS)
        for table, index in self.indexes.items():
            views[table] = IndexView(
                index.slot_groups, index.side_row, 0, 2 if self.share and not self.training else 0, 0
            )
        return views

    def insert(self, ids: torch.Tensor, rows: torch.Tensor, absent_per_table: list[int]) -> None:
        self.told.append(absent_per_table)
        self.inserts += 1
        for table, (begin, end) in enumerate(self.borders):
            if absent_per_table[table] == 0:
                continue
            assert table in HASHED
            mine = rows[begin:end]
            new = (mine < 0) & ~torch.isin(ids[begin:end], torch.tensor(self.never, dtype=torch.int64))
            mine[new] = self.indexes[table].find_or_insert(ids[begin:end][new])
            self.weights[table].data[mine[new]] = 0.5

    def answered(self, absent_per_table: list[int]) -> None:
        self.told.append(absent_per_table)

    borders: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Case:
    """One batch from raw ids, and what target ``reference`` needs to say the same."""

    ours: list[torch.Tensor]
    theirs: list[torch.Tensor]
    ids: LookupBatch
    indexes: Indexes

    def wanted_batch(self, scale: torch.Tensor | None) -> LookupBatch:
        """The rows that the index gives now; ids that train or read nothing are taken out of their bags."""
        rows = self.ids.values.clone()
        for table in HASHED:
            begin, end = self.indexes.borders[table]
            own_rows = self.indexes.indexes[table].find(rows[begin:end])
            if self.indexes.share:
                own_rows = torch.where(own_rows < 0, self.indexes.indexes[table].shared_rows(rows[begin:end]), own_rows)
            rows[begin:end] = own_rows
        kept = rows >= 0
        before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
        return LookupBatch(rows[kept], before[self.ids.offsets], None if scale is None else scale[kept], BATCH)


def case(indexes: dict[str, object], dtype: torch.dtype = torch.float32, weighted: bool = False) -> Case:
    ours = [nn.Parameter(torch.randn(rows, dim).to(dtype)) for rows, dim in zip(ROWS, DIMS, strict=True)]
    lengths = torch.randint(0, 9, (3 * BATCH,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    counts = [int(offsets[(table + 1) * BATCH] - offsets[table * BATCH]) for table in range(3)]
    known = torch.tensor([-1, *range(100, 125)])  # the last five have no row yet
    values = [known[torch.randint(0, 26, (count,))] for count in counts]
    values[1] = torch.randint(0, ROWS[1], (counts[1],))
    values[0][0], values[2][0] = 121, 124  # certainly absent
    scale = torch.rand(int(offsets[-1]), requires_grad=True) if weighted else None
    store = Indexes(weights=ours, **indexes)  # type: ignore[arg-type]
    store.borders = [(int(offsets[t * BATCH]), int(offsets[(t + 1) * BATCH])) for t in range(3)]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    return Case(ours, theirs, LookupBatch(torch.cat(values), offsets, scale, BATCH), store)


def kernel(weights: list[torch.Tensor], optimizers: list[FusedOptimizer | None], weighted: bool) -> cpu.CpuLookup:
    spec = LookupSpec(tables(), "SUM", weighted, weights, optimizers)
    assert CPU.decline(spec) is None
    built = cpu.build(spec)
    assert isinstance(built, cpu.CpuLookup)
    return built  # type: ignore[return-value]


def by_reference(built: Case, optimizers: list[FusedOptimizer | None], scale: torch.Tensor | None) -> torch.Tensor:
    spec = LookupSpec(tables(), "SUM", scale is not None, built.theirs, optimizers)
    return reference.build(spec)(built.theirs, built.wanted_batch(scale))[0]


def copy_new_rows(built: Case) -> None:
    """What ``insert`` has written before the sums, in the other copy of the tables."""
    for mine, other in zip(built.ours, built.theirs, strict=True):
        other.data.copy_(mine.data)


def indexed_tables() -> tuple[TableSpec, ...]:
    hashing = HashConfig(dense_rows=0)
    return tuple(
        replace(table, hashing=hashing.resolve(table.num_embeddings, adopt=False)) if number in HASHED else table
        for number, table in enumerate(tables())
    )


@pytest.mark.parametrize("described", [indexed_tables, tables])
def test_cpu_is_the_first_choice(described: Callable[[], tuple[TableSpec, ...]]) -> None:
    weights = case({"training": False}).ours
    choice = select_backend(LookupSpec(described(), "SUM", False, weights, [None] * 3), "auto", "")
    assert (choice.backend, choice.declined, choice.finding is not None) == ("cpu", (), True)


def test_rows_that_were_found_ahead_are_pooled_as_in_the_lookup() -> None:
    """A pipeline gives what steps one by one give, to the last bit."""
    built = case({"training": False}, weighted=True)
    ids = replace(built.ids, values=built.ids.values.clamp(max=119))  # those beyond have no row
    rows = replace(ids, values=ids.values.clone())
    for table, index in built.indexes.indexes.items():
        begin, end = built.indexes.borders[table]
        rows.values[begin:end] = index.find(ids.values[begin:end])
    lookup = cpu.build(LookupSpec(indexed_tables(), "SUM", True, built.ours, [None] * 3))
    torch.set_num_threads(1)
    (pooled,), (pooled_from_ids,) = lookup(built.ours, rows), lookup.from_ids(built.ours, ids, built.indexes)  # type: ignore[attr-defined]
    assert torch.equal(pooled, pooled_from_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_eval_reads_and_changes_nothing(dtype: torch.dtype, weighted: bool, share: bool) -> None:
    built = case({"training": False, "share": share}, dtype, weighted)
    before = [weight.detach().clone() for weight in built.ours]
    with torch.no_grad():
        pooled = kernel(built.ours, [None] * 3, weighted).from_ids(built.ours, built.ids, built.indexes)[0]
        scale = built.ids.per_sample_weights
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        rounded = 1e-2 if dtype == torch.bfloat16 else 1e-5  # the reference rounds its sums
        torch.testing.assert_close(pooled, by_reference(built, [None] * 3, scale), rtol=rounded, atol=tolerance)
    (told,) = built.indexes.told
    absent = [int((built.ids.values[begin:end] >= 120).sum()) for begin, end in built.indexes.borders]
    assert told == [absent[0], 0, absent[2]]
    assert absent[0] > 0
    assert built.indexes.inserts == 0
    assert all(torch.equal(weight, start) for weight, start in zip(built.ours, before, strict=True))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("never", [(), (121, 123)])
@pytest.mark.parametrize("training", [True, False])
def test_gradients(weighted: bool, never: tuple[int, ...], training: bool) -> None:
    built = case({"training": training, "never": never}, weighted=weighted)
    scale = built.ids.per_sample_weights
    other_scale = None if scale is None else scale.detach().clone().requires_grad_()
    pooled = kernel(built.ours, [None] * 3, weighted).from_ids(built.ours, built.ids, built.indexes)[0]
    assert built.indexes.inserts == int(training)
    copy_new_rows(built)
    expected = by_reference(built, [None] * 3, other_scale)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-6)
    cotangent = torch.randn(pooled.shape)
    pooled.backward(cotangent)
    expected.backward(cotangent)
    kernel(built.ours, [None] * 3, weighted).from_ids(built.ours, built.ids, built.indexes)
    assert built.indexes.inserts == training * (2 if never else 1), "ids that have a row by now are inserted again"
    for mine, other in zip(built.ours, built.theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)
    if scale is not None:
        torch.testing.assert_close(scale.grad, other_scale.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", ["step", "gradient", "weights of ids"])
def test_a_table_that_lost_rows_since_the_forward_is_refused(which: str) -> None:
    built = case({"training": False}, weighted=True)
    rows = LookupBatch(built.ids.values.clamp(0, 9), built.ids.offsets, built.ids.per_sample_weights, BATCH)
    last = int(rows.offsets[-1]) - 1  # of table 2
    rows.values[last] = 30
    if which != "weights of ids":
        rows = replace(rows, per_sample_weights=rows.per_sample_weights.detach())
    optimizers = [FusedOptimizer(RULE["sgd"], {"lr": 0.1}) if which == "step" else None for _ in ROWS]
    pooled = kernel(built.ours, optimizers, True)(built.ours, rows)[0]
    for weight in built.ours:
        weight.data = weight.data[:20].clone()
    before = [weight.detach().clone() for weight in built.ours]
    with pytest.raises(InputError) as caught:
        pooled.sum().backward()
    assert (caught.value.reason, "t2" in caught.value.module_path) == ("changed_before_backward", True)
    assert all(torch.equal(weight, start) for weight, start in zip(built.ours, before, strict=True))


def test_int32_and_empty_batches() -> None:
    built = case({"training": True})
    ours = kernel(built.ours, [None] * 3, False)
    wide = ours.from_ids(built.ours, built.ids, built.indexes)[0]
    narrow = LookupBatch(built.ids.values.int(), built.ids.offsets.int(), None, BATCH)
    assert torch.equal(ours.from_ids(built.ours, narrow, built.indexes)[0], wide)
    none = torch.zeros(0, dtype=torch.int64)
    nothing = ours.from_ids(built.ours, LookupBatch(none, torch.zeros(1, dtype=torch.int64), None, 0), built.indexes)[0]
    assert nothing.shape == (0, sum(DIMS))
    nothing.sum().backward()
    zeros = ours.from_ids(built.ours, LookupBatch(none, torch.zeros(10, dtype=torch.int64), None, 3), built.indexes)[0]
    assert torch.equal(zeros, torch.zeros(3, sum(DIMS)))
    zeros.sum().backward()


def test_tables_on_several_devices_are_declined_by_their_names() -> None:
    weights = [
        torch.zeros(rows, dim, device=device)
        for rows, dim, device in zip(ROWS, DIMS, ("meta", "cpu", "meta"), strict=True)
    ]
    declined = CPU.decline(LookupSpec(tables(), "SUM", False, weights, [None] * 3))
    assert declined is not None
    assert (declined.by, declined.code) == ("cpu", "device")
    assert "the tables are on cpu/meta;" in declined.message


def test_without_the_library_cpu_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LookupSpec(indexed_tables(), "SUM", False, case({"training": False}).ours, [None] * 3)
    monkeypatch.setattr(library, "load", lambda: False)
    monkeypatch.setattr(library, "why_not", lambda: "no C++ compiler found")
    choice = select_backend(spec, "auto", "")
    assert choice.backend == "fbgemm"
    (declined,) = choice.declined
    assert (declined.by, declined.code) == ("cpu", "no_library")
    assert "no C++ compiler found" in declined.message
