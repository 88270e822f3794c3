"""TorchRec's DLRM as a user builds and trains it; nothing here knows recfx."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
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
LOG_EVERY = 50


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


def train(model: DLRM, training: Rows, options: argparse.Namespace, name: str = "training") -> float:
    """The usual loop: Adam for the dense part, while the tables take their own step inside ``backward``.

    Returns:
        samples per second.
    """
    optimizer = torch.optim.Adam([*model.dense_arch.parameters(), *model.over_arch.parameters()], lr=1e-3)
    model.train()
    batches = training.shuffled_batches(options.batch_size, options.steps)
    often = 0.2 if sys.stderr.isatty() else 5.0
    bar = tqdm(batches, total=options.steps, unit="step", desc=name, mininterval=often)
    for step, batch in enumerate(bar, start=1):
        logits = model(*batch.model_input(options.device)).squeeze(-1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels.to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY == 0 or step == options.steps:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    return options.steps * len(batch) / bar.format_dict["elapsed"]


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
