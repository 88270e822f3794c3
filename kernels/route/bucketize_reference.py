"""``bucketize.py`` in ATen, entry by entry, on any device."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from recfx.kernels.index.buckets import home_rows
from recfx.kernels.route.bucketize import Routes


def bucketize(
    ids: Tensor, lengths: Tensor, batch_size: int, routes: Routes, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Has the contract of the operator."""
    check_routes(lengths.numel(), ids.numel(), batch_size, routes, weights)
    check_lengths(ids, lengths)
    by_feature = lengths.view(len(routes.row_borders), batch_size)
    features = ids.split(by_feature.sum(dim=1).tolist())
    pieces = [_pieces(feature, ids_of, routes) for feature, ids_of in enumerate(features)]
    begins = [0, *torch.cumsum(by_feature.sum(dim=1), 0).tolist()]
    ids_out, lengths_out, places_out = [ids[:0]], [lengths[:0]], [ids[:0].long()]
    for feature, piece in zip(routes.sources, routes.pieces, strict=True):
        own = torch.ones_like(features[feature], dtype=torch.bool) if piece < 0 else pieces[feature] == piece
        bags = torch.repeat_interleave(torch.arange(batch_size, device=ids.device), by_feature[feature].long())
        base = routes.row_borders[feature][piece] if piece >= 0 and routes.buckets[feature] == 0 else 0
        ids_out.append(features[feature][own] - base)
        lengths_out.append(torch.bincount(bags[own], minlength=batch_size).to(lengths.dtype))
        places_out.append(begins[feature] + torch.nonzero(own).squeeze(1))
    weights_out = None if weights is None else weights[torch.cat(places_out)]
    return torch.cat(ids_out), torch.cat(lengths_out), weights_out


def _pieces(feature: int, ids: Tensor, routes: Routes) -> Tensor:
    """The piece of each id of a feature; zeros if the feature is not cut."""
    borders, rows, buckets = routes.row_borders[feature], routes.rows[feature], routes.buckets[feature]
    if not borders:
        return torch.zeros_like(ids)
    if buckets == 0:
        outside = ids[(ids < 0) | (ids >= rows)]
        if outside.numel() > 0:
            refuse_outside(int(outside[0]), feature, rows)
        home = ids
    else:
        home = home_rows(ids, rows, routes.dense_rows[feature], buckets, routes.seeds[feature])
    inner = torch.tensor(borders[1:-1], dtype=torch.int64, device=ids.device)
    return torch.searchsorted(inner, home, right=True)


def refuse_outside(id_: int, feature: int, rows: int) -> NoReturn:
    """Raise the IndexError for an id that is no row of its table."""
    raise IndexError(f"recfx: bucketize: id {id_} of feature {feature} is outside its {rows} rows")


def check_lengths(ids: Tensor, lengths: Tensor) -> None:
    """Raise RuntimeError unless there are as many ids as the lengths say."""
    if bool((lengths < 0).any()) or int(lengths.sum()) != ids.numel():
        raise RuntimeError(f"recfx: bucketize: lengths add up to {int(lengths.sum())}, but there are {ids.numel()} ids")


def check_routes(bags: int, ids: int, batch_size: int, routes: Routes, weights: Tensor | None) -> None:
    """Raise RuntimeError unless the numbers of bags, ids and weights and the routes fit together."""
    features = len(routes.row_borders)
    if bags != features * batch_size:
        raise RuntimeError(f"recfx: bucketize: lengths must be [{features} * {batch_size}], got [{bags}]")
    if weights is not None and weights.numel() != ids:
        raise RuntimeError(f"recfx: bucketize: weights must be [{ids}], got {list(weights.shape)}")
    for feature, (borders, rows) in enumerate(zip(routes.row_borders, routes.rows, strict=True)):
        if borders and (len(borders) < 2 or borders != sorted(borders) or (borders[0], borders[-1]) != (0, rows)):
            raise RuntimeError(f"recfx: bucketize: row borders of feature {feature} must ascend from 0 to {rows}")
    for feature, piece in zip(routes.sources, routes.pieces, strict=True):
        if not 0 <= feature < features or not -1 <= piece < max(0, len(routes.row_borders[feature]) - 1):
            raise RuntimeError(f"recfx: bucketize: feature {feature} has no piece {piece}")
