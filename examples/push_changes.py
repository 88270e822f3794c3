"""A trainer that sends what has changed to its servers every few steps, and a server that answers meanwhile.

    python examples/push_changes.py [--pushes 5] [--steps 20] [--folder DIR]

The trainer writes a base, and then deltas into a folder, each by one rename, so that whoever copies the folder to other
machines (rsync, or an object store whose uploads appear as a whole) sees complete files only. The server here is a
thread with ``recfx.load``; ``recfx_serve DIR/base.pt --deltas DIR/deltas`` does the same without Python. In the end,
the answers are compared with those of a file that is exported as a whole.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx

FEATURES = {"user": 50_000, "item": 20_000}


class Ranker(torch.nn.Module):
    """Scores a user and an item."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=32, feature_names=[name])
                for name, rows in FEATURES.items()
            ]
        )
        self.over = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()).squeeze(1)


def batch(generator: torch.Generator, size: int = 256) -> KeyedJaggedTensor:
    """One raw id of each feature: a few come again and again, and every batch has new ones."""
    ids = torch.rand(len(FEATURES), size, generator=generator).pow(6).mul(200_000).long() * 7_919_000_003
    return KeyedJaggedTensor(list(FEATURES), ids.view(-1), lengths=torch.ones(ids.numel(), dtype=torch.int64))


def serve(model: recfx.LoadedModel, folder: Path, seen: dict[int, float], done: threading.Event) -> None:
    """Apply deltas as they appear; requests could be answered by ``model`` in any thread all the time."""
    while True:
        is_last = done.is_set()
        while (path := folder / f"{model.manifest['number'] + 1:06}.delta").exists():
            model.apply(path)
            seen[model.manifest["number"]] = time.time()
        if is_last:
            return
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description="A trainer that sends what has changed to its servers.")
    parser.add_argument("--pushes", type=int, default=5, help="how many deltas are sent")
    parser.add_argument("--steps", type=int, default=20, help="steps between two deltas")
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary folder)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    (folder / "deltas").mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    raw_ids = recfx.HashConfig.raw_ids(on_full="evict")
    model = recfx.convert(Ranker(), hashing=raw_ids)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.05})
    optimizer = torch.optim.Adam(model.over.parameters(), lr=0.01)

    recfx.track_changes(model)
    sample = (batch(generator),)
    last = folder / "base.pt"
    report = recfx.export(model, last, sample, quantize="int8")
    print(f"base: {report.bytes:,} bytes")

    server, seen, done = recfx.load(last), dict[int, float](), threading.Event()
    thread = threading.Thread(target=serve, args=(server, folder / "deltas", seen, done))
    thread.start()
    stepped: dict[int, float] = {}
    for push in range(1, arguments.pushes + 1):
        model.train()
        for _ in range(arguments.steps):
            features = batch(generator)
            labels = (features.values()[: features.stride()] % 2).float()
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(features), labels).backward()
            optimizer.step()
        stepped[push] = time.time()
        path = folder / "deltas" / f"{push:06}.delta"
        delta = recfx.export_delta(model, path, base=last)
        last = path
        rows, new = (sum(getattr(table, name) for table in delta.tables) for name in ("rows", "new"))
        print(f"delta {push}: {rows:,} rows, {new:,} new ids, {delta.bytes:,} bytes")
    done.set()
    thread.join()
    slowest = max(seen[push] - stepped[push] for push in stepped)
    print(f"from a step to its answers: {slowest:.2f} s at most")

    recfx.export(model, folder / "whole.pt", sample, quantize="int8")
    whole, asked = recfx.load(folder / "whole.pt"), batch(generator)
    print(f"answers of a whole export: {'the same' if torch.equal(server(asked), whole(asked)) else 'others'}")


if __name__ == "__main__":
    main()
