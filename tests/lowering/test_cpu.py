"""What target ``cpu`` serves, and what it refuses.

``tests/passes/test_fuse_hash_lookup.py`` compares what it makes of raw ids, ``test_targets.py`` what of rows.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from recfx.errors import InputError
from recfx.hashing import HashConfig
from recfx.ir import TableSpec
from recfx.kernels.build import library
from recfx.lowering import cpu
from recfx.lowering.registry import BACKENDS, LookupBatch, LookupSpec, select_backend
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import RULES
from tests.support.refusals import refused

ROWS, DIMS = (60, 40, 50), (8, 20, 5)
HASHED = (0, 2)  # table 1 is adopted
BATCH = 6
RULE = {rule.name: rule for rule in RULES}
(CPU,) = (backend for backend in BACKENDS if backend.name == "cpu")


def tables() -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(f"t{n}", (f"f{n}",), (f"f{n}",), rows, dim, "SUM", HashConfig().resolve(rows, adopt=True), 0.0, 0.0)
        for n, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True))
    )


def weights() -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(rows, dim)) for rows, dim in zip(ROWS, DIMS, strict=True)]


def indexed_tables() -> tuple[TableSpec, ...]:
    hashing = HashConfig(dense_rows=0)
    return tuple(
        replace(table, hashing=hashing.resolve(table.num_embeddings, adopt=False)) if number in HASHED else table
        for number, table in enumerate(tables())
    )


@pytest.mark.parametrize("described", [indexed_tables, tables])
def test_cpu_is_the_first_choice(described: Callable[[], tuple[TableSpec, ...]]) -> None:
    choice = select_backend(LookupSpec(described(), "SUM", False, weights(), [None] * 3), "auto", "")
    assert (choice.backend, choice.declined, choice.finding is not None) == ("cpu", (), True)


@pytest.mark.parametrize("which", ["step", "gradient", "weights of ids"])
def test_a_table_that_lost_rows_since_the_forward_is_refused(which: str) -> None:
    ours, lengths = weights(), torch.randint(1, 9, (3 * BATCH,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    scale = torch.rand(int(offsets[-1]), requires_grad=which == "weights of ids")
    rows = LookupBatch(torch.randint(0, 10, scale.shape), offsets, scale, BATCH)
    rows.values[-1] = 30  # of table 2
    optimizers = [FusedOptimizer(RULE["sgd"], {"lr": 0.1}) if which == "step" else None for _ in ROWS]
    spec = LookupSpec(tables(), "SUM", True, ours, optimizers)
    assert CPU.decline(spec) is None
    pooled = cpu.build(spec)(ours, rows)[0]
    for weight in ours:
        weight.data = weight.data[:20].clone()
    before = [weight.detach().clone() for weight in ours]
    with refused("changed_before_backward", error=InputError) as caught:
        pooled.sum().backward()
    assert "t2" in caught.value.module_path
    assert all(torch.equal(weight, start) for weight, start in zip(ours, before, strict=True))


def test_tables_on_several_devices_are_declined_by_their_names() -> None:
    on = [
        torch.zeros(rows, dim, device=device)
        for rows, dim, device in zip(ROWS, DIMS, ("meta", "cpu", "meta"), strict=True)
    ]
    declined = CPU.decline(LookupSpec(tables(), "SUM", False, on, [None] * 3))
    assert declined is not None
    assert (declined.by, declined.code) == ("cpu", "device")
    assert "the tables are on cpu/meta;" in declined.message


def test_without_the_library_cpu_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LookupSpec(indexed_tables(), "SUM", False, weights(), [None] * 3)
    monkeypatch.setattr(library, "load", lambda: False)
    monkeypatch.setattr(library, "why_not", lambda: "no C++ compiler found")
    choice = select_backend(spec, "auto", "")
    assert choice.backend == "fbgemm"
    (declined,) = choice.declined
    assert (declined.by, declined.code) == ("cpu", "no_library")
    assert "no C++ compiler found" in declined.message
