"""stub"""
from __future__ import annotations
from typing import NamedTuple
import torch
from torch import Tensor
class Routes(NamedTuple):
    row_borders: list[list[int]]
    rows: list[int]
    dense_rows: list[int]
    buckets: list[int]
    seeds: list[int]
    sources: list[int]
    pieces: list[int]
def bucketize(ids: Tensor, lengths: Tensor, batch_size: int, routes: Routes, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    per_bag = lengths.long()
    offsets = torch.zeros(per_bag.numel() + 1, dtype=torch.int64); torch.cumsum(per_bag, 0, out=offsets[1:])
    bag = torch.repeat_interleave(torch.arange(per_bag.numel()), per_bag)
    out_ids, out_lengths, out_weights = [], [], []
    for f, p in zip(routes.sources, routes.pieces):
        b, e = int(offsets[f * batch_size]), int(offsets[(f + 1) * batch_size])
        mine, bags = ids[b:e], bag[b:e] - f * batch_size
        keep = torch.ones_like(mine, dtype=torch.bool)
        if p >= 0:
            borders = torch.tensor(routes.row_borders[f])
            owner = torch.searchsorted(borders, mine, right=True) - 1
            keep = owner == p
            mine = mine - borders[p]
        out_ids.append(mine[keep]); out_lengths.append(torch.bincount(bags[keep], minlength=batch_size).to(lengths.dtype))
        if weights is not None: out_weights.append(weights[b:e][keep])
    return torch.cat(out_ids), torch.cat(out_lengths), torch.cat(out_weights) if weights is not None else None
