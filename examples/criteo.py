"""Rows in the format of Criteo's display-advertising log, either generated or read from a file.

A row is a click label, 13 integers and 26 categorical ids. The ids are raw: they have not been mapped to 0, 1, 2, ...
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

DENSE = [f"I{number}" for number in range(1, 14)]
CATEGORICAL = [f"C{number}" for number in range(1, 27)]

POWER_LAW_EXPONENT = 1.1
MISSING = 0.05
"""Share of the values that are missing in generated rows, both dense and categorical."""


class BadRows(ValueError):
    """A file does not contain the log in a known format."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a log.

    Args:
        labels: ``[n]`` float32, 1 for a click.
        dense: ``[n, numbers]`` float32; of Criteo's log, ``log(1 + x)``, 0 where missing.
        ids: ``[n, features]`` int64, raw.
        present: ``[n, features]`` bool, False where an id is missing.
        features: the names of the categorical features.
        truth: ``[n]``, the logit of a click that the label was drawn with, where it is known.
    """

    labels: torch.Tensor
    dense: torch.Tensor
    ids: torch.Tensor
    present: torch.Tensor
    features: Sequence[str] = tuple(CATEGORICAL)
    truth: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: slice | torch.Tensor) -> Rows:
        truth = None if self.truth is None else self.truth[which]
        return Rows(self.labels[which], self.dense[which], self.ids[which], self.present[which], self.features, truth)

    def model_input(self, device: torch.device) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """The DLRM's inputs: dense features, and one bag per feature and row, which is empty if the id is missing."""
        present = self.present.t()
        features = KeyedJaggedTensor(
            list(self.features), self.ids.t()[present], lengths=present.reshape(-1).long(), stride=len(self)
        )
        return self.dense.to(device), features.to(device)

    def batches(self, size: int) -> Iterator[Rows]:
        """Batches in order; the last one may be smaller."""
        for begin in range(0, len(self), size):
            yield self[begin : begin + size]

    def shuffled_batches(self, size: int, steps: int, seed: int = 0) -> Iterator[Rows]:
        """``steps`` batches of full size (or all rows, if there are fewer), epoch after epoch in a new order."""
        generator = torch.Generator().manual_seed(seed)
        size = min(size, len(self))
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < size:
                order = torch.cat([order, torch.randperm(len(self), generator=generator)])
            yield self[order[:size]]
            order = order[size:]


def generate(count: int, most_ids: int, seed: int = 0) -> Rows:
    """Rows with something to learn: every raw id has a hidden effect on the click, a fixed function of the id.

    Args:
        count: number of rows.
        most_ids: number of distinct ids of the largest feature; the others have fewer, down to 4, as in the real log.
        seed: the seed for drawing rows; the ids and their effects do not depend on it.
    """
    random = np.random.default_rng(seed)
    sizes = np.geomspace(4, most_ids, len(CATEGORICAL)).astype(np.int64)  # few features have many ids
    ids = np.empty((count, len(CATEGORICAL)), dtype=np.int64)
    logits = np.full(count, -0.5)
    present = random.random(ids.shape) >= MISSING
    for feature, size in enumerate(sizes):
        popularity = np.arange(1, size + 1, dtype=np.float64) ** -POWER_LAW_EXPONENT
        ranks = random.choice(size, count, p=popularity / popularity.sum())
        ids[:, feature] = _mix(ranks + (feature << 40)).view(np.int64)  # all 64 bits, half of them negative
        logits += present[:, feature] * _hidden_effect(ids[:, feature])
    counts = np.floor(random.exponential(1.0, (count, len(DENSE))) ** 2 * 20)
    counts[random.random(counts.shape) < MISSING] = np.nan
    dense = _squash(counts)
    logits += 0.1 * (dense[:, 0] - dense[:, 1])
    labels = random.random(count) < 1 / (1 + np.exp(-logits))
    return replace(_rows(labels, dense, ids, present), truth=torch.from_numpy(logits))


def read(path: Path, most_rows: int) -> Rows:
    """Read the log as Criteo publishes it (tab-separated, no header), or as comma-separated values with a header.

    Args:
        path: a file with a label, 13 integers and 26 hexadecimal ids per line; missing values are empty.
        most_rows: stop after this many rows.

    Raises:
        BadRows: there are no rows, or a line does not have this format.
    """
    labels, dense, ids = [], [], []
    with open(path, newline="") as file:
        header = file.readline()
        comma = header.startswith("label,")
        if not comma:
            file.seek(0)
        lines = csv.reader(file, delimiter="," if comma else "\t")
        for number, line in enumerate(islice(lines, most_rows), start=2 if comma else 1):
            try:
                if len(line) != 1 + len(DENSE) + len(CATEGORICAL):
                    raise ValueError(f"{len(line)} columns")
                labels.append(float(line[0]))
                dense.append([float(value) if value else np.nan for value in line[1:14]])
                ids.append([int(value, 16) if value else -1 for value in line[14:]])
            except ValueError as error:
                raise BadRows(
                    f"{path}, line {number} is not a label, 13 integers and 26 hexadecimal ids ({error})"
                ) from error
    if not labels:
        raise BadRows(f"{path} has no rows")
    raw = np.array(ids, dtype=np.int64)
    return _rows(np.array(labels), _squash(np.array(dense)), raw, raw >= 0)


def _rows(labels: np.ndarray, dense: np.ndarray, ids: np.ndarray, present: np.ndarray) -> Rows:
    floats = (torch.from_numpy(values.astype(np.float32)) for values in (labels, dense))
    return Rows(*floats, torch.from_numpy(ids), torch.from_numpy(present))


def _squash(counts: np.ndarray) -> np.ndarray:
    """``log(1 + x)``, 0 where missing; the log has a few negative counts, which become 0."""
    return np.log1p(np.nan_to_num(counts).clip(min=0))


def _mix(numbers: np.ndarray) -> np.ndarray:
    """splitmix64: maps different numbers to different, random-looking 64-bit values."""
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _hidden_effect(ids: np.ndarray) -> np.ndarray:
    """What an id adds to the logit of a click, in [-0.7, 0.7): a function of its bits alone."""
    return ((_mix(ids.view(np.uint64)) >> np.uint64(11)).astype(np.float64) / 2**53 - 0.5) * 1.4
