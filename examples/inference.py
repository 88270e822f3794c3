"""TorchRec's inference flow on a converted model: train, quantize, shard, trace, script, save, load.

    python examples/inference.py                     # about a minute
    python examples/inference.py --smoke             # smaller
    python examples/inference.py --device npu:0      # or cuda:0: trained there, served on the CPU

Two ways lead from the trained model to a file that a server loads without Python. ``recfx.export`` takes raw ids to the
server. TorchRec's own flow stays open to teams that have a server for it: it quantizes, shards and scripts the
unconverted model, which takes rows instead of ids.
"""

import argparse
import copy
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torchrec.fx
from criteo import Rows, generate
from dlrm import build_dlrm, sample_of, to_rows, train
from processes import find_device, quiet
from torch import fx, nn
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.inference.modules import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    shard_quant_model,
)
from train_dlrm import SIZES, check, section

import recfx

# The tables of TorchRec's quantized collections; its tracer must not enter them.
LEAVES = ["IntNBitTableBatchedEmbeddingBagsCodegen"]
CPU = torch.device("cpu")
EQUAL = 1e-5
QUANTIZED = 0.01
"""How far a click's logit may move because rows are stored in 8 bits."""


def main() -> int:
    options = parse_arguments()
    quiet()
    for category in (DeprecationWarning, FutureWarning):  # torch says at each call that TorchScript is deprecated
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", "The TorchScript type system")  # about TorchRec's own modules
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        passed = run(options, Path(directory))
    if options.device.type == "cpu":
        print("\nAll of this ran on the CPU of this machine; nothing ran on an NPU.")
    else:
        print(f"\nThe model was trained on {options.device}. All files were run on the CPU: the operators in them that")
        print("read rows (FBGEMM's quantized lookups, in TorchRec's flow as in recfx's files) have no kernel for NPUs.")
    return 0 if all(passed) else 1


def run(options: argparse.Namespace, directory: Path) -> list[bool]:
    """Every step, and whether its answers are right."""
    section("1. Train", "a DLRM on raw ids; converted before training, so that ids get rows when they are first seen")
    rows = generate(options.steps * options.batch_size + 64, options.ids)
    training, batch = rows[:-64], rows[-64:]
    model = recfx.convert(build_dlrm(options), sample_of(training, options), hashing=recfx.HashConfig.raw_ids())
    train([model], [training], options)
    model.eval()
    on_device = answer(model, batch, options.device)
    model = model.to(CPU)
    trained = answer(model, batch)
    passed = [compare("moved to the CPU", trained, on_device)]
    print(f"below, answers to {len(batch)} other samples are compared with those of this model")
    sample = training[:64].model_input(CPU)

    section("2. recfx.export and recfx.load", "raw ids go to the server: the file has the indexes, and needs no Python")
    for quantize, most in ((None, EQUAL), ("int8", QUANTIZED)):
        report = recfx.export(model, directory / "model.pt", sample, quantize=quantize)
        loaded = recfx.load(directory / "model.pt")
        passed.append(compare(f"recfx.export, quantize={quantize!r}", answer(loaded, batch), trained, most))
        print(f"   {report.bytes:,} bytes")

    section("3. TorchRec's flow", "recfx.unconvert gives the standard model, and the rows of all ids")
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    by_rows = to_rows(batch, mapping)
    passed.append(compare("recfx.unconvert", answer(plain, by_rows), trained))
    set_propogate_device(True)  # otherwise TorchRec takes the CPU for a GPU when it shards for inference
    for world_size in (1, 2):
        passed += torchrec_flow(plain, world_size, by_rows, trained, directory)
    set_propogate_device(False)
    return passed


def torchrec_flow(plain: nn.Module, world_size: int, batch: Rows, trained: torch.Tensor, directory: Path) -> list[bool]:
    """Quantize, shard, trace, script, save, load and run in one process."""
    print(f"\n-- sharded to {world_size} device{'s' * (world_size > 1)}")
    quantized = quantize_inference_model(copy.deepcopy(plain))
    in_8_bits = answer(quantized, batch)
    passed = [compare("quantize_inference_model", in_8_bits, trained, QUANTIZED)]
    weights = get_table_to_weights_from_tbe(quantized)
    sharded, plan = shard_quant_model(quantized, world_size=world_size, compute_device="cpu", sharding_device="cpu")
    assign_weights_to_tbe(sharded, weights)  # until then, all rows are zero
    (tables,) = plan.plan.values()
    counts = [sum(rank in (table.ranks or []) for table in tables.values()) for rank in range(world_size)]
    passed.append(compare(f"shard_quant_model: {counts} tables on the devices", answer(sharded, batch), in_8_bits))
    graph = fx.GraphModule(sharded, torchrec.fx.Tracer(leaf_modules=LEAVES).trace(sharded))
    passed.append(compare(f"torchrec.fx: {len(graph.graph.nodes)} nodes", answer(graph, batch), in_8_bits))
    if not hasattr(torch.ops.fbgemm, "linearize_cache_indices"):  # for CPUs
        print(
            "   FBGEMM 1.4 and older have no operator that torch.jit.script needs for quantized tables: it is left out"
        )
        return passed
    passed.append(compare("torch.jit.script, save, load", answer(save_and_load(graph, directory), batch), in_8_bits))
    return passed


def save_and_load(model: nn.Module, directory: Path) -> Any:
    path = directory / "script.pt"
    torch.jit.save(torch.jit.script(model), path)
    return torch.jit.load(path)


@torch.no_grad()
def answer(model: Any, batch: Rows, device: torch.device = CPU) -> torch.Tensor:
    """The logits of a batch ``[n]``, on the CPU."""
    return model(*batch.model_input(device)).squeeze(-1).cpu()


def compare(what: str, answers: torch.Tensor, expected: torch.Tensor, most: float = EQUAL) -> bool:
    error = float((answers - expected).abs().max())
    return check(f"{what}: largest difference {error:.1e}", error <= most)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="where the model is trained: cpu, cuda:0, npu:0")
    parser.add_argument("--smoke", action="store_true", help="a few small steps, only to see that everything runs")
    options = parser.parse_args()
    size = SIZES["smoke"] if options.smoke else {**SIZES["full"], "steps": 100, "ids": 12_000}
    vars(options).update(size, rows=size["ids"] * 5 // 3, device=find_device(options.device))
    return options


if __name__ == "__main__":
    sys.exit(main())
