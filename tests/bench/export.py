"""``export``: exported hashed models against TorchRec's quantized, sharded, traced and scripted flow, both int8.

TorchRec's file is static: it takes rows, and cannot hold ids. Both are loaded from their files, run by TorchScript, and
answer alike.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.fx import Tracer
from torchrec.inference.modules import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    shard_quant_model,
)

import recfx
from recfx.kernels.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare, take_turns
from tests.bench.setup import DISTRIBUTIONS, Ids, Setup
from tests.bench.workload import fill_with_ids, standard_collection

NATIVE, HASHED = "recfx file, own operators, raw ids", "recfx file, raw ids"
ADOPTED, SCRIPTED = "recfx file, dense ids", "TorchRec file, dense ids"
TAKEN = 0.75


class Pooled(nn.Module):
    """A collection and nothing else."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.ebc = collection

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """The pooled embeddings ``[B, sum D]``."""
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled


# TorchRec's tracer writes them into the graph's code as they are, and strings would not compile.
Pooled.forward.__annotations__ = get_type_hints(Pooled.forward)


def run(setup: Setup) -> Iterator[Result]:
    """A forward of each file, for big and for small batches; the sizes of the files are among the facts."""
    with tempfile.TemporaryDirectory() as directory:
        for size in (setup, replace(setup, batch=min(setup.batch, 64), iterations=4 * setup.iterations)):
            for distribution in DISTRIBUTIONS:
                yield from _compare(size, distribution, Path(directory))


def _compare(setup: Setup, distribution: str, directory: Path) -> Iterator[Result]:
    universe = int(setup.rows * TAKEN)
    dense, raw = (Ids(setup, distribution, universe, raw=form) for form in (None, mix64))
    standard = Pooled(standard_collection(setup))
    adopted = recfx.convert(copy.deepcopy(standard), verify=False).eval()
    indexed = recfx.convert(copy.deepcopy(standard), hashing=recfx.HashConfig(dense_rows=0), verify=False).eval()
    fill_with_ids(indexed.ebc, adopted.ebc, universe)
    paths = {name: directory / f"{number}.pt" for number, name in enumerate((NATIVE, HASHED, ADOPTED, SCRIPTED))}
    recfx.export(indexed, paths[NATIVE], raw.batches()[-1], quantize="int8", portable=False)
    recfx.export(indexed, paths[HASHED], raw.batches()[-1], quantize="int8")
    recfx.export(adopted, paths[ADOPTED], dense.batches()[-1], quantize="int8")
    _scripted_by_torchrec(standard, dense.batches()[-1], paths[SCRIPTED])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at each call that TorchScript is deprecated
        files = {name: torch.jit.load(str(path)) for name, path in paths.items()}
    batches = {NATIVE: raw.batches(), HASHED: raw.batches(), ADOPTED: dense.batches(), SCRIPTED: dense.batches()}
    contestants = [Contestant(name, lambda i, name=name: files[name](batches[name][i])) for name in files]
    with torch.no_grad():
        answers = [contestant.run(-1) for contestant in contestants]
        for answer in answers[1:]:  # each sum has an error of up to half a step per id
            torch.testing.assert_close(answer, answers[0], rtol=1e-3, atol=1e-3)
        times = take_turns(contestants, setup.iterations, setup.warm_up)
    facts = {
        **setup.facts(distribution),
        **{f"{name} bytes": path.stat().st_size for name, path in paths.items()},
        "ids_in_index": universe,
    }
    for ours in (NATIVE, HASHED, ADOPTED):
        yield compare(f"export/{setup.case(distribution)}", times, ours, SCRIPTED, facts)


def _scripted_by_torchrec(model: nn.Module, batch: KeyedJaggedTensor, path: Path) -> None:
    set_propogate_device(True)
    try:
        quantized = quantize_inference_model(copy.deepcopy(model))
        weights = get_table_to_weights_from_tbe(quantized)
        sharded, _ = shard_quant_model(quantized, world_size=1, compute_device="cpu", sharding_device="cpu")
        assign_weights_to_tbe(sharded, weights)
        sharded(batch)  # makes its input dist, which a tracer could not
        graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(sharded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(torch.jit.script(torch.fx.GraphModule(sharded, graph)), str(path))
    finally:
        set_propogate_device(False)
