"""Exported files rank as well as the trained models, with rows as they are and with quantized rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.functional import binary_cross_entropy_with_logits

import recfx
from tests.builders.movielens import TwoTowers, auc, ids_of, read_ratings

BOUNDS = {None: 1e-6, "fp16": 1e-4, "int8": 1e-3, "int4": 5e-3}
"""By how much the AUC of an exported file may differ from that of the trained model."""

Predict = Callable[[Any], torch.Tensor]


def assert_ranks_as_well(
    model: nn.Module, sample: tuple[Any, ...], predict: Predict, labels: torch.Tensor, at_least: float, path: Path
) -> None:
    trained = auc(predict(model), labels)
    assert trained > at_least  # or there would be nothing to lose
    aucs = {}
    for quantize in BOUNDS:
        report = recfx.export(model, path, sample, quantize=quantize)
        aucs[quantize] = auc(predict(recfx.load(path)), labels)
        assert (report.output_error > 1e-6) == (quantize is not None)
        print(f"quantize={quantize}: AUC {aucs[quantize]:.6f}, trained {trained:.6f}, {report.bytes:,} bytes")
    for quantize, most in BOUNDS.items():
        assert abs(aucs[quantize] - trained) <= most, quantize


def test_movielens(data_directory: Path, tmp_path: Path) -> None:
    ratings = read_ratings(data_directory / "ml-100k" / "ml-100k.inter")
    torch.manual_seed(11)
    model: Any = TwoTowers()
    _apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.05})
    model = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0))
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("ebc.")]
    optimizer = torch.optim.Adagrad(dense, lr=0.05)
    for features, liked in ratings.batches(0, 90_000):
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(ids_of(features, raw=True)), liked).backward()
        optimizer.step()
    model.eval()
    held_back = [(ids_of(features, raw=True), liked) for features, liked in ratings.batches(90_000, 100_000)]

    @torch.no_grad()
    def predict(run: Any) -> torch.Tensor:
        return torch.cat([run(features) for features, _ in held_back])

    labels = torch.cat([liked for _, liked in held_back])
    assert_ranks_as_well(model, (held_back[0][0],), predict, labels, 0.75, tmp_path / "model.pt")
