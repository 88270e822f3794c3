"""TorchRec's DLRM as a user builds and trains it; nothing here knows recfx."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from criteo import CATEGORICAL, DENSE, Rows
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm

EVALUATION_BATCH = 4096
ROUND = 10
"""Steps that a model trains before it is the turn of the next one."""


def build_collection(tables: Mapping[str, int], options: argparse.Namespace) -> EmbeddingBagCollection:
    """A table for each feature, of so many rows; they take their step, row-wise Adagrad, in backward."""
    configs = [
        EmbeddingBagConfig(
            name=f"table_{feature}",
            num_embeddings=rows,
            embedding_dim=options.dim,
            feature_names=[feature],
            weight_init_min=-0.01,
            weight_init_max=0.01,
        )
        for feature, rows in tables.items()
    ]
    collection = EmbeddingBagCollection(configs, device=options.device)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    return collection


def build_dlrm(
    options: argparse.Namespace, collection: torch.nn.Module | None = None, numbers: int = len(DENSE)
) -> DLRM:
    """The model around a collection; without one, with ``options.rows`` rows for each feature of Criteo's log."""
    if collection is None:
        collection = build_collection(dict.fromkeys(CATEGORICAL, options.rows), options)
    return DLRM(
        embedding_bag_collection=collection,
        dense_in_features=numbers,
        dense_arch_layer_sizes=[64, options.dim],
        over_arch_layer_sizes=[64, 1],
    ).to(options.device)


def sample_of(rows: Rows, options: argparse.Namespace) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """One small call of the model."""
    return rows[:64].model_input(options.device)


def train(models: Sequence[DLRM], streams: Sequence[Rows], options: argparse.Namespace) -> list[float]:
    """Train each of some models on a stream of its own. They take turns of a few steps, so that whatever else the
    machine does meanwhile slows all of them down alike.

    Returns:
        for each model, the CPU time of a step in seconds: the time of all threads, the median of its turns.
    """
    turns = zip(*(rounds(model, rows, options) for model, rows in zip(models, streams, strict=True)), strict=True)
    often = 0.2 if sys.stderr.isatty() else 5.0
    bar = tqdm(turns, total=-(-options.steps // ROUND), unit="turn", desc="training", mininterval=often)
    times = []
    for turn in bar:
        seconds, losses = zip(*turn, strict=True)
        times.append(seconds)
        bar.set_postfix(loss=", ".join(f"{loss:.4f}" for loss in losses), refresh=False)
    return [statistics.median(own) for own in zip(*times, strict=True)]


def rounds(model: DLRM, training: Rows, options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """The usual loop: Adam for the dense part, while the tables take their own step inside ``backward``. After every
    ``ROUND`` steps, it yields the CPU time of one of them, and the loss.
    """
    optimizer = torch.optim.Adam([*model.dense_arch.parameters(), *model.over_arch.parameters()], lr=1e-3)
    model.train()
    batches = training.shuffled_batches(options.batch_size, options.steps)
    while turn := list(itertools.islice(batches, ROUND)):
        begin = time.process_time()
        for batch in turn:
            logits = model(*batch.model_input(options.device)).squeeze(-1)
            loss = binary_cross_entropy_with_logits(logits, batch.labels.to(options.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield (time.process_time() - begin) / len(turn), loss.item()


@torch.no_grad()
def predict(model: Any, rows: Rows, options: argparse.Namespace) -> torch.Tensor:
    """Click probabilities ``[n]``, on the CPU."""
    model.eval()
    logits = [model(*batch.model_input(options.device)) for batch in rows.batches(EVALUATION_BATCH)]
    return torch.cat(logits).squeeze(-1).sigmoid().cpu()


def auc(rows: Rows, predictions: torch.Tensor) -> float:
    """How often a click is ranked above a non-click."""
    return float(binary_auroc(predictions, rows.labels.long()))


def to_rows(batch: Rows, mapping: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Rows:
    """Map ids to rows by hand, as serving the plain model requires; ids without a row are left out of their bags."""
    columns = []
    for feature, ids in zip(batch.features, batch.ids.t().tolist(), strict=True):
        known, rows = mapping[f"table_{feature}"]
        row_of = dict(zip(known.tolist(), rows.tolist(), strict=True))
        columns.append(torch.tensor([row_of.get(id_, -1) for id_ in ids]))
    rows_of_ids = torch.stack(columns, dim=1)
    return replace(batch, ids=rows_of_ids, present=batch.present & (rows_of_ids >= 0))
