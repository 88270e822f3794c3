"""What recfx writes of a trained model: report, picture, cost, a file for servers; and what the C++ server answers."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

import torch
from criteo import Rows
from processes import topology
from serve_cpp.client import parse_answers, request_text
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx

SERVER = Path("build/serve_cpp/recfx_serve")
RANKS = 4
"""The number of ranks of the sharded model that is drawn. They need not be there."""


def write_all(model: nn.Module, batch: Rows, folder: Path) -> float:
    """Write the files, and print a line for each.

    Args:
        model: converted.
        batch: the step that is priced is one of such a batch; the file and the server are asked about a few rows of it.
        folder: which is created.

    Returns:
        the largest difference between an answer and the model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).cpu()  # whatever it was trained on, the file is for servers with a CPU
    rows, cpu = batch[:16], torch.device("cpu")
    sample, step = rows.model_input(cpu), batch.model_input(cpu)

    (folder / "report.html").write_text(recfx.explain(model).to_html(), encoding="utf-8")
    tell("recfx.explain", folder / "report.html", "what was converted, how ids become rows, the kernels and why")

    recfx.draw(model.train(), folder / "model.html", sample=step)
    tell("recfx.draw", folder / "model.html", "the model before and after, node by node")

    recfx.draw(model, folder / "sharded.html", topology(cpu, RANKS, RANKS), sample=step)
    tell("recfx.draw", folder / "sharded.html", f"as a rank of {RANKS} would have it, with what ranks exchange")

    priced = recfx.cost(model, sample=step).at()
    (folder / "cost.txt").write_text(f"{priced}\n", encoding="utf-8")
    about = f"of each node; a training step: {1e3 * priced.seconds:.1f} ms predicted for {priced.hardware.name}"
    tell("recfx.cost", folder / "cost.txt", f"{about}, {priced.batch} samples")

    file = folder / "dlrm.pt"
    exported = recfx.export(model.eval(), file, sample, quantize="int8")
    tell("recfx.export", file, f"int8 rows, {exported.bytes / 2**20:.1f} MiB; loads without Python")

    requests = folder / "requests.txt"
    requests.write_text(request_text("1", by_name(*sample)), encoding="utf-8")
    if SERVER.exists():
        done = subprocess.run([SERVER, file], input=requests.read_text(), capture_output=True, text=True, check=True)
        (folder / "answers.txt").write_text(done.stdout, encoding="utf-8")
        (answer,) = next(parse_answers(done.stdout.splitlines(keepends=True))).outputs.values()
        tell("C++ server", folder / "answers.txt", f"{len(rows)} logits; the first is {answer[0].item():.4f}")
    else:
        answer = recfx.load(file)(*sample)
        tell("C++ server", requests, f"not built: make serve, then {SERVER} {file} < {requests}")
    with torch.no_grad():
        return float((answer - model(*sample)).abs().max())


def by_name(dense: torch.Tensor, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    """The inputs of the file, which are those of the DLRM's forward, as plain tensors."""
    tensors = {"dense_features": dense}
    for feature, bags in sparse.to_dict().items():
        tensors[f"sparse_features.{feature}.values"] = bags.values()
        tensors[f"sparse_features.{feature}.lengths"] = bags.lengths()
    return tensors


def tell(what: str, file: Path, about: str) -> None:
    print(f"{what:<14} {file!s:<26} {about}")
