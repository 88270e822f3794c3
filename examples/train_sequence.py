"""Train a small SASRec on raw 64-bit item ids: which film does a user rate next?

    python examples/train_sequence.py                            # generated histories, about a minute
    python examples/train_sequence.py --smoke                    # a few small steps
    python examples/train_sequence.py --data ml-100k/u.data      # MovieLens: user, item, rating and time, by tabs
    python examples/train_sequence.py --device npu:0             # or cuda:0; nothing else changes

The model has a standard ``EmbeddingCollection``, which gives a row for each film of a history. It is trained twice on
the same batches: as it is, with films numbered beforehand, and converted, on ids as they are in the log. The script
compares how many of the films that users really rate next are among the ten best, saves and loads the trained model,
and exports it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import find_device, quiet
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm
from train_dlrm import check, section

import recfx

LONGEST = 30  # films of a history that the model looks at
NEGATIVES = 63  # films that the right one is told from, in training
BEST = 10
SIZES = {
    "full": {"steps": 800, "users": 900, "films": 600, "dim": 32, "batch_size": 128},
    "smoke": {"steps": 20, "users": 40, "films": 60, "dim": 8, "batch_size": 16},
}


class Sasrec(nn.Module):
    """Self-attention over a user's history, and the score of each candidate; it knows nothing about recfx."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="film",
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=["history", "candidates"],
            weight_init_min=-0.05,
            weight_init_max=0.05,
        )
        self.films = EmbeddingCollection([table])
        self.positions = nn.Parameter(torch.zeros(LONGEST, dim))
        self.register_buffer("places", torch.arange(LONGEST), persistent=False)
        self.attention = nn.Linear(dim, 3 * dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(3)])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """``features`` has a user's ``history`` and ``candidates``; returns a score for each candidate, ``[n]``."""
        rows = self.films(features)
        history, candidates = rows["history"], rows["candidates"]
        padded = history.to_padded_dense(LONGEST)
        is_film = self.places < history.lengths().unsqueeze(1)
        state = self.norms[0](padded + self.positions)
        query, key, value = self.attention(state).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_film.unsqueeze(1))
        state = self.norms[1](padded + attended)
        state = self.norms[2](state + self.feed_forward(state))
        last = (history.lengths().clamp(1, LONGEST) - 1).long().view(-1, 1, 1).expand(-1, 1, state.shape[2])
        user = state.gather(1, last).squeeze(1)
        of_user = torch.repeat_interleave(candidates.lengths().long())
        return (user.index_select(0, of_user) * candidates.values()).sum(1)


@dataclass
class Histories:
    """What users rated, in the order of time, as raw ids. The last film of each is held back."""

    films: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.known = torch.cat(self.films).unique()

    def batch(self, size: int, random: torch.Generator) -> KeyedJaggedTensor:
        """The next film of some users at some time, as the first of their candidates; the others are drawn."""
        history, candidates, known = [], [], self.known
        drawn = torch.randint(len(known), (size, NEGATIVES), generator=random)
        for user in torch.randint(len(self.films), (size,), generator=random).tolist():
            films = self.films[user]
            now = int(torch.randint(1, len(films) - 1, (1,), generator=random))
            history.append(films[max(0, now - LONGEST) : now])
            candidates.append(torch.cat([films[now : now + 1], known[drawn[len(candidates)]]]))
        return as_features(history, candidates)

    def last(self, begin: int, end: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
        """The histories of some users with all films as candidates, and the films that they rated last."""
        users = self.films[begin:end]
        history = [films[-1 - LONGEST : -1] for films in users]
        return as_features(history, [self.known] * len(users)), torch.stack([films[-1] for films in users])


def as_features(history: list[torch.Tensor], candidates: list[torch.Tensor]) -> KeyedJaggedTensor:
    """The batch of the model."""
    jagged = {"history": JaggedTensor.from_dense(history), "candidates": JaggedTensor.from_dense(candidates)}
    return KeyedJaggedTensor.from_jt_dict(jagged)


def main() -> int:
    options = parse_arguments()
    quiet()
    section("1. The histories", "raw ids: any 64 bits, not mapped to rows of a table")
    histories = read(options.data) if options.data else generate(options.users, options.films)
    known = histories.known
    rated = sum(map(len, histories.films))
    print(f"{len(histories.films):,} users rated {len(known):,} films {rated:,} times; some ids: {known[:3].tolist()}")

    section("2. The model as it is", "its ids are row numbers, so films are numbered first")
    numbered = Histories([torch.searchsorted(known, films) for films in histories.films])
    standard = train(build(len(known), options), numbered, options)
    expected = recall(standard, numbered, options)
    print(f"recall@{BEST} of the film that users rate next: {expected:.3f}")

    section("3. recfx.convert", "a new id gets a row when it is first seen; nothing is numbered")
    model = recfx.convert(build(2 * len(known), options), hashing=recfx.HashConfig.raw_ids())
    train(model, histories, options)
    reached = recall(model, histories, options)
    print(recfx.explain(model))
    print(f"recall@{BEST} of the film that users rate next: {reached:.3f}")

    features, _ = histories.last(0, 8)
    scores = predict(model, features, options)
    with tempfile.TemporaryDirectory() as folder:
        section("4. A checkpoint", "weights, ids and optimizer state; loaded into a model that is built anew")
        recfx.save_checkpoint(model, Path(folder) / "checkpoint")
        fresh = recfx.convert(build(2 * len(known), options), hashing=recfx.HashConfig.raw_ids())
        recfx.load_checkpoint(fresh, Path(folder) / "checkpoint")
        loaded = predict(fresh, features, options)

        section("5. recfx.export and recfx.load", "raw ids go to the server; examples/serve_cpp answers without Python")
        model.eval()
        report = recfx.export(model.cpu(), Path(folder) / "model.pt", (features,))
        served = recfx.load(Path(folder) / "model.pt")(features)
        print(f"{report.bytes:,} bytes")

    section("Checks")
    passed = [
        check("the loaded model gives the same scores, bit for bit", torch.equal(scores, loaded)),
        check("the exported model gives the same scores", torch.allclose(scores, served, rtol=1e-5, atol=1e-5)),
    ]
    if options.size == "full":
        chance = BEST / len(known)
        passed.append(check(f"it has learned: recall {reached:.3f}, by chance {chance:.3f}", reached > 5 * chance))
        passed.append(check(f"raw ids do as well as numbers: {reached:.3f}, {expected:.3f}", reached > 0.8 * expected))
    if options.device.type == "cpu":
        print("\nAll of this ran on the CPU of this machine; nothing ran on an NPU.")
    return 0 if all(passed) else 1


def build(rows: int, options: argparse.Namespace) -> Sasrec:
    torch.manual_seed(0)
    model = Sasrec(rows, options.dim).to(options.device)
    apply_optimizer_in_backward(RowWiseAdagrad, model.films.parameters(), {"lr": 0.1})
    return model


def train(model: Any, histories: Histories, options: argparse.Namespace) -> Any:
    """The usual loop: Adam for the dense part, while the table takes its own step inside ``backward``."""
    dense = [weight for name, weight in model.named_parameters() if not name.startswith("films.")]
    optimizer, random = torch.optim.Adam(dense, lr=2e-3), torch.Generator().manual_seed(0)
    model.train()
    often = 0.2 if sys.stderr.isatty() else 5.0
    bar = tqdm(range(options.steps), unit="step", desc="training", mininterval=often)
    for _ in bar:
        features = histories.batch(options.batch_size, random).to(options.device)
        scores = model(features).view(options.batch_size, 1 + NEGATIVES)
        loss = functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{options.steps * options.batch_size / bar.format_dict['elapsed']:,.0f} samples/s")
    print(f"loss {loss.item():.3f} after {options.steps:,} steps")
    return model


@torch.no_grad()
def predict(model: Any, features: KeyedJaggedTensor, options: argparse.Namespace) -> torch.Tensor:
    return model.eval()(features.to(options.device)).cpu()


def recall(model: Any, histories: Histories, options: argparse.Namespace) -> float:
    """How often the film that a user rated last is among the best of all films."""
    known, hits = histories.known, 0
    for begin in range(0, len(histories.films), 64):
        features, rated = histories.last(begin, begin + 64)
        best = predict(model, features, options).view(len(rated), -1).topk(min(BEST, len(known))).indices
        hits += int((known[best] == rated.unsqueeze(1)).sum())
    return hits / len(histories.films)


def generate(users: int, films: int) -> Histories:
    """Histories in which a film is mostly followed by one of a few: what the model has to find."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(-(2**62), 2**62, (films,), generator=random)
    followers = torch.randint(films, (films, 4), generator=random)
    histories = []
    for _ in range(users):
        film, history = int(torch.randint(films, (1,), generator=random)), []
        for step in torch.randint(5, (LONGEST,), generator=random).tolist():
            film = int(followers[film, step]) if step < 4 else int(torch.randint(films, (1,), generator=random))
            history.append(film)
        histories.append(ids[history])
    return Histories(histories)


def read(path: Path) -> Histories:
    """MovieLens' own format; a first line with names is left out. Ids are spread over 64 bits, as raw ids are."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    rated: dict[str, list[tuple[float, int]]] = {}
    for user, film, _, time, *_ in (line for line in lines if line[0].isdigit()):
        rated.setdefault(user, []).append((float(time), int(film) * 0x9E3779B97F4A7C1 % 2**62))
    ordered = [torch.tensor([film for _, film in sorted(films)]) for films in rated.values()]
    return Histories([films for films in ordered if len(films) > 3])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, cuda:0, npu:0 (default %(default)s)")
    parser.add_argument("--data", type=Path, help="ratings of MovieLens: user, item, rating, time, by tabs")
    parser.add_argument("--smoke", dest="size", action="store_const", const="smoke", default="full", help="small steps")
    options = parser.parse_args()
    vars(options).update(SIZES[options.size], device=find_device(options.device))
    return options


if __name__ == "__main__":
    sys.exit(main())
