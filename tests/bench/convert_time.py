"""``convert_time``: how long a conversion takes, and how it grows with the number of tables."""

from collections.abc import Iterator
from dataclasses import replace

import torch

import recfx
from tests.bench.harness import Contestant, Result, compare, take_turns
from tests.bench.setup import Ids, Setup
from tests.bench.workload import standard_collection

CONVERT, CONSTRUCT = "recfx.convert", "EmbeddingBagCollection(...)"


def run(setup: Setup) -> Iterator[Result]:
    """Models of 125 to 1,000 tables; ``growth`` is the time relative to the model of half the size (linear: 2)."""
    for checks, repeats in (("no checks", 5), ("verified", 2)):
        before: float | None = None
        for tables in setup.model_sizes:
            size = replace(setup, tables=tables, rows=100, dim=16, batch=32, bag_length=2, iterations=0, warm_up=0)
            model, (sample, *_) = standard_collection(size), Ids(size, "uniform").batches()

            def convert(_: int, model: torch.nn.Module = model, sample: object = sample) -> torch.nn.Module:
                return recfx.convert(model, sample=(sample,), verify=checks == "verified")  # noqa: B023

            torch.testing.assert_close(convert(0)(sample).values(), model(sample).values(), rtol=1e-5, atol=1e-6)
            construct = Contestant(CONSTRUCT, lambda _, size=size: standard_collection(size))
            times = take_turns([Contestant(CONVERT, convert), construct], repeats, 0)
            case = f"convert_time/{checks.replace(' ', '_')}/{tables}_tables"
            result = compare(case, times, CONVERT, CONSTRUCT, {**size.facts("uniform"), "checks": checks})
            result.setup["seconds"] = round(result.ours_ms / 1e3, 3)
            if before is not None:
                result.setup["growth"] = round(result.ours_ms / before, 3)
            before = result.ours_ms
            yield result
