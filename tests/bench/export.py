"""``export``: exported hashed models against TorchRec's quantized, sharded, traced and scripted flow, both int8.

TorchRec's file is static: it takes rows, and cannot hold ids. Both are loaded from their files, run by TorchScript, and
answer alike. A file with recfx's own operators is also compared with the portable one, with FBGEMM's.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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
from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare_all, must_agree
from tests.bench.setup import DISTRIBUTIONS, Ids, Setup
from tests.bench.workload import fill_with_ids, standard_collection
from tests.builders.models import Pooled

NATIVE, HASHED = "recfx file, own operators, raw ids", "recfx file, raw ids"
ADOPTED, SCRIPTED = "recfx file, dense ids", "TorchRec file, dense ids"
TAKEN = 0.75


def run(setup: Setup) -> Iterator[Result]:
    """A forward of each file, for big and for small batches; the sizes of the files are among the facts."""
    with tempfile.TemporaryDirectory() as directory:
        for size in (setup, replace(setup, batch=min(setup.batch, 64), iterations=4 * setup.iterations)):
            yield from _compare(size, Path(directory))


def _compare(setup: Setup, directory: Path) -> Iterator[Result]:
    universe = int(setup.rows * TAKEN)
    dense, raw = (_sample(setup, universe, form) for form in (None, mix64))
    standard = Pooled(standard_collection(setup))
    adopted, indexed = _converted(standard, universe)
    paths = {name: directory / f"{number}.pt" for number, name in enumerate((NATIVE, HASHED, ADOPTED, SCRIPTED))}
    recfx.export(indexed, paths[NATIVE], raw, quantize="int8", portable=False)
    recfx.export(indexed, paths[HASHED], raw, quantize="int8")
    recfx.export(adopted, paths[ADOPTED], dense, quantize="int8")
    _scripted_by_torchrec(standard, dense, paths[SCRIPTED])
    files = {name: _loaded(path) for name, path in paths.items()}
    sizes = {f"{name} bytes": path.stat().st_size for name, path in paths.items()}
    for distribution in DISTRIBUTIONS:
        ids = {form: Ids(setup, distribution, universe, raw=form).batches() for form in (None, mix64)}
        batches = {name: ids[mix64 if name in (NATIVE, HASHED) else None] for name in files}
        contestants = [
            Contestant(name, lambda i, name=name, batches=batches: files[name](batches[name][i])) for name in files
        ]
        with torch.no_grad():
            must_agree(contestants, rtol=1e-3, atol=1e-3)  # each sum has an error of up to half a step per id
            facts = {**setup.facts(distribution), **sizes, "ids_in_index": universe}
            pairs = [*((ours, SCRIPTED) for ours in (NATIVE, HASHED, ADOPTED)), (NATIVE, HASHED)]
            yield from compare_all(f"export/{setup.case(distribution)}", contestants, setup, facts, pairs)


def _sample(setup: Setup, universe: int, raw: Callable[[torch.Tensor], torch.Tensor] | None) -> KeyedJaggedTensor:
    return Ids(replace(setup, iterations=0, warm_up=0), "uniform", universe, raw=raw).batches()[-1]


def _converted(standard: Pooled, universe: int) -> tuple[nn.Module, nn.Module]:
    """With tables whose ids are rows, and with tables that hold as many raw ids as the universe has."""
    adopted = recfx.convert(copy.deepcopy(standard), verify=False).eval()
    indexed = recfx.convert(copy.deepcopy(standard), hashing=recfx.HashConfig(dense_rows=0), verify=False).eval()
    fill_with_ids(indexed.ebc, adopted.ebc, universe)
    return adopted, indexed


def _loaded(path: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at each call that TorchScript is deprecated
        file: nn.Module = torch.jit.load(str(path))
    return file


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
