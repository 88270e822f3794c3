"""A model on string ids, from its first day to a file for servers: hash, train, evict, stop, resume, export.

    python examples/whole_life.py      # a few seconds

A shop's log names users and items by strings. Each day brings new items, and last week's are hardly asked for, so the
table of items is kept smaller than the catalogue. The script trains for three days, stops, resumes in a model that is
built anew, trains for three more, and exports; at the end it compares that model with one that was never stopped.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx

DIM, BATCH_SIZE, STEPS_A_DAY = 16, 64, 20
USERS, ITEMS_A_DAY, ROWS_OF_ITEMS = 500, 100, 150


def id_of(name: str) -> int:
    """A stable 64-bit hash of a string: the same in every process, language and year."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass
class Batch:
    """What the model takes: ids of ``user``, ``history`` and ``item``, and the hour of each request ``[B, 1]``."""

    ids: KeyedJaggedTensor
    hour: torch.Tensor


class Ranker(torch.nn.Module):
    """Will a user click on an item, given what he looked at last? It knows nothing about recfx."""

    def __init__(self) -> None:
        super().__init__()
        users = EmbeddingBagConfig(name="user_table", num_embeddings=1000, embedding_dim=DIM, feature_names=["user"])
        items = EmbeddingConfig(
            name="item_table", num_embeddings=ROWS_OF_ITEMS, embedding_dim=DIM, feature_names=["history", "item"]
        )
        self.users, self.items = EmbeddingBagCollection([users]), EmbeddingCollection([items])
        self.query = torch.nn.Linear(DIM + 1, DIM)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The logit of a click ``[B]``."""
        user = self.users(batch.ids)["user"]
        items = self.items(batch.ids)
        item, history = items["item"].values(), items["history"].to_padded_dense(10)
        query = self.query(torch.cat([user, batch.hour], dim=1)) + item
        attention = torch.softmax(torch.einsum("bd,bld->bl", query, history), dim=1)
        return (item * (user + torch.einsum("bl,bld->bd", attention, history))).sum(dim=1)


def day(number: int) -> list[tuple[Batch, torch.Tensor]]:
    """The batches of a day, with labels ``[B]``: users of a group like items of the same group."""
    draw = random.Random(number)
    on_sale = range(number * ITEMS_A_DAY // 2, (number + 2) * ITEMS_A_DAY // 2)  # half of them were on sale yesterday
    batches = []
    for _ in range(STEPS_A_DAY):
        users, items = draw.choices(range(USERS), k=BATCH_SIZE), draw.choices(on_sale, k=BATCH_SIZE)
        histories = [
            [f"item-{item}" for item in on_sale if item % 2 == user % 2 and draw.random() < 0.1] for user in users
        ]
        features = {
            "user": [[f"user-{user}"] for user in users],
            "history": histories,
            "item": [[f"item-{item}"] for item in items],
        }
        ids = KeyedJaggedTensor.from_jt_dict({name: jagged(names) for name, names in features.items()})
        hours = torch.tensor([[draw.random()] for _ in users])
        labels = torch.tensor([float(user % 2 == item % 2) for user, item in zip(users, items, strict=True)])
        batches.append((Batch(ids, hours), labels))
    return batches


def jagged(bags: Sequence[Sequence[str]]) -> JaggedTensor:
    """The ids of strings, one bag for each sample."""
    return JaggedTensor(
        torch.tensor([id_of(name) for bag in bags for name in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags]),
    )


def build(sample: Batch) -> tuple[Ranker, torch.optim.Optimizer]:
    """The converted model, and the optimizer of all that is no table; the tables take their step in backward."""
    torch.manual_seed(0)
    model = Ranker()
    for tables in (model.users, model.items):
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.2})
    hashing = {
        "user_table": recfx.HashConfig.raw_ids(),
        "item_table": recfx.HashConfig.raw_ids(on_full="evict", evict="lru"),
    }
    model = recfx.convert(model, sample=(sample,), hashing=hashing)
    return model, torch.optim.Adam(model.query.parameters(), lr=1e-2)


def train(model: Ranker, optimizer: torch.optim.Optimizer, days: Sequence[int]) -> None:
    for number in days:
        losses = []
        for batch, labels in day(number):
            loss = binary_cross_entropy_with_logits(model.train()(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        evicted = model.items.index("item_table").counters["evicted"]
        print(f"day {number}: loss {sum(losses) / len(losses):.3f}, {evicted} items have lost their row so far")


def main() -> int:
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    batch = day(5)[0][0]
    model, optimizer = build(batch)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, file = Path(directory) / "checkpoint", Path(directory) / "ranker.pt"
        train(model, optimizer, days=range(3))
        recfx.save_checkpoint(model, checkpoint, optimizer=optimizer)
        resumed, resumed_optimizer = build(batch)
        recfx.load_checkpoint(resumed, checkpoint, optimizer=resumed_optimizer)
        print("stopped, and resumed in a new model")
        train(resumed, resumed_optimizer, days=range(3, 6))
        train(model, optimizer, days=range(3, 6))
        report = recfx.export(resumed.eval(), file, (batch,), quantize="int8")
        served = recfx.load(file)(batch)
    answers = resumed(batch)
    print(
        f"exported: {report.bytes:,} bytes with the indexes; the largest error of int8 is "
        f"{(served - answers).abs().max():.4f}"
    )
    same = torch.equal(answers, model.eval()(batch))
    print(f"the resumed model answers as the one that was never stopped, bit for bit: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
