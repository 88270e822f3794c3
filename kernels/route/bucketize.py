"""Routes ids to the pieces of tables that are cut by rows.

``recfx::bucketize`` runs in C++ on the CPU (``csrc/route/bucketize.cpp``), by the kernels in ``bucketize_triton.py``
where they can be launched, and in ATen everywhere else.
"""

from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from recfx.kernels.build import launch, library
from recfx.kernels.build.plain_arguments import with_plain_arguments
from recfx.kernels.index.buckets import home_rows
from recfx.kernels.index.mix64 import mix64_integer
from recfx.kernels.route.from_zero import from_zero

WHOLE = -1
"""Instead of a piece: all ids of the feature, unchanged."""
_BAGS = 64  # of a program on a GPU


class Routes(NamedTuple):
    """How the ids of each input feature map to pieces, and what each entry of the output holds.

    The piece of an id is the one that holds its home row. If the ids of a table are its rows (``buckets`` is 0), the
    home row is the id itself; if the table has an index, it is what ``buckets.home_rows`` returns. Empty pieces hold no
    ids.
    """

    row_borders: list[list[int]]  # per feature: where pieces begin, ascending from 0 to rows; []: not cut
    dense_rows: list[int]  # of each feature's table, as are the next three
    rows: list[int]
    buckets: list[int]  # 0: ids are rows
    seeds: list[int]
    sources: list[int]  # per entry: its feature; may repeat
    pieces: list[int]  # per entry: WHOLE, or a piece of the feature


def bucketize(
    ids: Tensor, lengths: Tensor, batch_size: int, routes: Routes, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sort ids by entry, then by bag, keeping their order within a bag.

    Takes linear time; the result does not depend on the number of threads.

    If a table without an index is cut, its ids leave as rows of the piece: the id minus the piece's first row. All
    other ids leave unchanged.

    Args:
        ids: int64 ``[n]``, feature by feature and bag by bag.
        lengths: int32 or int64 ``[F * B]``, the number of ids in each bag.
        batch_size: ``B``.
        routes: see ``Routes``.
        weights: ``[n]``, one per id: floats, or integers of 32 or 64 bits, which are only moved.

    Returns:
        ids: int64, entry by entry.
        lengths: ``[entries * B]``, the number of ids in each bag of each entry, in the dtype of ``lengths``.
        weights: one per id of the output, or None if no weights were given.

    Raises:
        IndexError: a feature is cut, its ids are rows, and one of them is out of range. The message names the number of
            the feature and the first such id.
        RuntimeError: the arguments do not fit together.
    """
    borders, border_counts = list(chain.from_iterable(routes.row_borders)), list(map(len, routes.row_borders))
    arguments = (ids, lengths, batch_size, borders, border_counts, *routes[1:], weights)
    ids_out, lengths_out, weights_out = library.operators().bucketize(*arguments)
    return ids_out, lengths_out, None if weights is None else weights_out


@library.fake("bucketize")
def _fake(ids: Tensor, lengths: Tensor, batch_size: int, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    routes, weights = _routes_and_weights(*arguments)
    count = torch.library.get_ctx().new_dynamic_size()
    weights_out = ids.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(count)
    return ids.new_empty(count), lengths.new_empty(len(routes.sources) * batch_size), weights_out


def _routes_and_weights(borders: list[int], border_counts: list[int], *rest: Any) -> tuple[Routes, Tensor | None]:
    """The last arguments of the operator, which takes all borders and how many each feature has."""
    starts = [0, *accumulate(border_counts)]
    row_borders = [borders[start : start + count] for start, count in zip(starts, border_counts, strict=False)]
    *lists, weights = rest
    return Routes(row_borders, *lists), weights


@library.reference("bucketize")
def bucketize_reference(
    ids: Tensor, lengths: Tensor, batch_size: int, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in ATen, entry by entry; without weights, the third tensor is empty."""
    routes, weights = _routes_and_weights(*arguments)
    _check_routes(lengths.numel(), ids.numel(), batch_size, routes, weights)
    _check_lengths(ids, lengths)
    by_feature = lengths.view(len(routes.row_borders), batch_size)
    features = ids.split(by_feature.sum(dim=1).tolist())
    pieces = [_pieces_of(feature, ids_of, routes) for feature, ids_of in enumerate(features)]
    begins = [0, *torch.cumsum(by_feature.sum(dim=1), 0).tolist()]
    ids_out, lengths_out, places_out = [ids[:0]], [lengths[:0]], [ids[:0].long()]
    for feature, piece in zip(routes.sources, routes.pieces, strict=True):
        own = torch.ones_like(features[feature], dtype=torch.bool) if piece < 0 else pieces[feature] == piece
        bags = torch.repeat_interleave(torch.arange(batch_size, device=ids.device), by_feature[feature].long())
        base = routes.row_borders[feature][piece] if piece >= 0 and routes.buckets[feature] == 0 else 0
        ids_out.append(features[feature][own] - base)
        lengths_out.append(torch.bincount(bags[own], minlength=batch_size).to(lengths.dtype))
        places_out.append(begins[feature] + torch.nonzero(own).squeeze(1))
    weights_out = ids.new_empty(0, dtype=torch.float32) if weights is None else weights[torch.cat(places_out)]
    return torch.cat(ids_out), torch.cat(lengths_out), weights_out


def _pieces_of(feature: int, ids: Tensor, routes: Routes) -> Tensor:
    """The piece of each id of a feature; zeros if the feature is not cut."""
    borders, rows, buckets = routes.row_borders[feature], routes.rows[feature], routes.buckets[feature]
    if not borders:
        return torch.zeros_like(ids)
    if buckets == 0:
        outside = ids[(ids < 0) | (ids >= rows)]
        if outside.numel() > 0:
            _refuse_outside(int(outside[0]), feature, rows)
        home = ids
    else:
        home = home_rows(ids, rows, routes.dense_rows[feature], buckets, routes.seeds[feature])
    inner = torch.tensor(borders[1:-1], dtype=torch.int64, device=ids.device)
    return torch.searchsorted(inner, home, right=True)


def _refuse_outside(id_: int, feature: int, rows: int) -> NoReturn:
    """Raise the IndexError for an id that is no row of its table."""
    raise IndexError(f"recfx: bucketize: id {id_} of feature {feature} is outside its {rows} rows")


def _check_lengths(ids: Tensor, lengths: Tensor) -> None:
    """Raise RuntimeError unless there are as many ids as the lengths say."""
    if bool((lengths < 0).any()) or int(lengths.sum()) != ids.numel():
        raise RuntimeError(f"recfx: bucketize: lengths add up to {int(lengths.sum())}, but there are {ids.numel()} ids")


def _check_routes(bags: int, ids: int, batch_size: int, routes: Routes, weights: Tensor | None) -> None:
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


@library.kernel("bucketize", "CUDA", "PrivateUse1")
@with_plain_arguments
def bucketize_triton(ids: Tensor, lengths: Tensor, batch_size: int, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator by the kernels in Triton, where they can be launched.

    The host waits for the device once per call: for the number of ids of the output, and whether the batch is valid.
    """
    routes, weights = _routes_and_weights(*arguments)
    if lengths.numel() == 0 or not routes.sources or not launch.is_possible(ids.device):
        return bucketize_reference(ids, lengths, batch_size, *arguments)
    _check_routes(lengths.numel(), ids.numel(), batch_size, routes, weights)
    from recfx.kernels.route import bucketize_triton as kernels

    device, bags, features = ids.device, lengths.numel(), len(routes.rows)
    hashable: Any = (tuple(map(tuple, routes.row_borders)), *map(tuple, routes[1:]))
    on_device = _routes_on(device, Routes(*hashable))
    most = on_device.most_pieces
    is_invalid = (lengths < 0).any() | (lengths.sum() != ids.numel())
    # Nothing outside of the ids is read, whatever the lengths are.
    offsets = from_zero(lengths, ids.numel()).clamp(0, ids.numel())
    piece_of_id = torch.empty(ids.numel(), dtype=torch.int32, device=device)
    counts = torch.zeros(bags, most, dtype=torch.int32, device=device)
    on_gpu = launch.takes_gpu_forms(device)
    programs = -(-bags // _BAGS) if on_gpu else launch.programs(device, bags)
    outside = torch.empty(programs, dtype=torch.int64, device=device)
    launch.launch(
        kernels.recfx_bucket_counts_on_gpu if on_gpu else kernels.recfx_bucket_counts, programs,
        ids, offsets, on_device.fields, on_device.borders, piece_of_id, counts, outside, bags, batch_size, ids.numel(),
        most, **({"BAGS": _BAGS} if on_gpu else {"BLOCK_W": 1 << (most - 1).bit_length()}),
    )  # fmt: skip
    choices = torch.cat([counts.to(lengths.dtype).view(features, batch_size, most), lengths.view(features, -1, 1)], 2)
    choices = choices.transpose(1, 2).reshape(-1, batch_size)
    new_lengths = choices.index_select(0, on_device.choices).view(-1)
    new_offsets = from_zero(new_lengths, len(routes.sources) * ids.numel())
    total, first_outside, invalid = torch.stack([new_offsets[-1], outside.min(), is_invalid.long()]).tolist()
    if invalid:
        _check_lengths(ids, lengths)
    if first_outside < ids.numel():
        feature = int((offsets[::batch_size] <= first_outside).sum()) - 1
        _refuse_outside(int(ids[first_outside]), feature, routes.rows[feature])
    new_ids = ids.new_empty(total)
    new_weights = ids.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(total)
    bags = new_lengths.numel()
    launch.launch(
        kernels.recfx_bucket_scatter_on_gpu if on_gpu else kernels.recfx_bucket_scatter,
        -(-bags // _BAGS) if on_gpu else launch.programs(device, bags), ids,
        new_weights if weights is None else weights, offsets, piece_of_id, on_device.fields, on_device.borders,
        on_device.sources, on_device.pieces, new_offsets, new_ids, new_weights,
        bags, batch_size, WEIGHTED=weights is not None, **({"BAGS": _BAGS} if on_gpu else {}),
    )  # fmt: skip
    return new_ids, new_lengths, new_weights


class _RoutesOnDevice(NamedTuple):
    """``Routes`` as the kernels read them."""

    fields: Tensor  # int64 [F * FIELDS]
    borders: Tensor  # int64, of all features
    sources: Tensor  # int32 [entries]
    pieces: Tensor  # int32 [entries]
    choices: Tensor  # int64 [entries]: which of a feature's counts, or its length, is the length of the entry
    most_pieces: int


@lru_cache(maxsize=256)
def _routes_on(device: torch.device, routes: Routes) -> _RoutesOnDevice:
    """The routes have tuples in the place of lists."""
    row_borders, _, _, _, _, sources, pieces = routes
    starts = [0, *accumulate(map(len, row_borders))][:-1]
    fields = [
        [start, max(0, len(borders) - 1), dense, number, bucket, mix64_integer(seed) if seed else 0]
        for start, borders, dense, number, bucket, seed in zip(starts, *routes[:5], strict=True)
    ]
    most = max(1, *(len(borders) - 1 for borders in row_borders))
    choices = [
        source * (most + 1) + (piece if piece >= 0 else most) for source, piece in zip(sources, pieces, strict=True)
    ]
    return _RoutesOnDevice(
        fields=launch.numbers_on(device, tuple(chain.from_iterable(fields))),
        borders=launch.numbers_on(device, tuple(chain.from_iterable(row_borders))),
        sources=launch.numbers_on(device, tuple(sources), torch.int32),
        pieces=launch.numbers_on(device, tuple(pieces), torch.int32),
        choices=launch.numbers_on(device, tuple(choices)), most_pieces=most,
    )  # fmt: skip
