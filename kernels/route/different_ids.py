"""The different ids of each key of a batch, and the sums of rows that belong to the same one.

``recfx::different_ids`` and ``recfx::sum_rows`` run in C++ on the CPU (``csrc/route/different_ids.cpp``) and in ATen
everywhere else.
"""

import torch
from torch import Tensor

from recfx.kernels.build import library


def different_ids(ids: Tensor, ids_per_key: list[int], chosen: list[bool]) -> tuple[Tensor, Tensor, list[int]]:
    """Find the first of the equal ids of each key.

    Args:
        ids: int64 ``[n]``, key by key.
        ids_per_key: how many ids each of the ``F`` keys has.
        chosen: for each key, whether its ids are compared; in others, every id counts as different.

    Returns:
        is_first: bool ``[n]``, whether no equal id of the key comes before.
        numbers: int64 ``[n]``, the number of each id among the first ones of its key.
        different: how many first ones each key has.

    Raises:
        RuntimeError: the arguments do not fit together.
    """
    is_first, numbers, different = library.operators().different_ids(ids, ids_per_key, chosen)
    return is_first, numbers, different.tolist()


@library.fake("different_ids")
def _fake_different_ids(ids: Tensor, ids_per_key: list[int], chosen: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    return ids.new_empty(ids.shape[0], dtype=torch.bool), torch.empty_like(ids), ids.new_empty(len(ids_per_key))


@library.reference("different_ids")
def different_ids_reference(ids: Tensor, ids_per_key: list[int], chosen: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in ATen, key by key; ``different`` is int64 ``[F]``."""
    if sum(ids_per_key) != ids.numel() or len(chosen) != len(ids_per_key) or min(ids_per_key, default=0) < 0:
        raise RuntimeError(f"recfx: different_ids: {ids_per_key} for {len(chosen)} keys of {ids.numel()} ids")
    is_first, numbers = torch.ones_like(ids, dtype=torch.bool), torch.empty_like(ids)
    different = list(ids_per_key)
    begin = 0
    for key, (count, is_chosen) in enumerate(zip(ids_per_key, chosen, strict=True)):
        places = torch.arange(count, device=ids.device)
        if is_chosen:
            values, which = torch.unique(ids[begin : begin + count], return_inverse=True)
            first = places.new_full(values.shape, count).scatter_reduce_(0, which, places, "amin")
            of_key = first.index_select(0, which) == places
            is_first[begin : begin + count] = of_key
            places = (of_key.cumsum(0) - 1).index_select(0, first.index_select(0, which))
            different[key] = values.numel()
        numbers[begin : begin + count] = places
        begin += count
    return is_first, numbers, torch.tensor(different, dtype=torch.int64, device=ids.device)


def sum_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Add up rows, place by place, in the order of the rows.

    Args:
        rows: float32 ``[n, D]``.
        places: int64 ``[n]``, from 0 to ``count - 1``.
        count: the number of sums.

    Returns:
        float32 ``[count, D]``; zeros where no row belongs.

    Raises:
        RuntimeError: the arguments do not fit together.
    """
    return library.operators().sum_rows(rows, places, count)


@library.fake("sum_rows")
def _fake_sum_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    return rows.new_empty(count, rows.shape[1])


@library.reference("sum_rows")
def sum_rows_reference(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """The operator in ATen. On the CPU ``index_add_`` goes row by row; elsewhere ``index_put_`` sorts the places."""
    if rows.dim() != 2 or places.shape != rows.shape[:1]:
        raise RuntimeError(f"recfx: sum_rows: rows are {list(rows.shape)}, places {list(places.shape)}")
    if places.numel() and not bool(((places >= 0) & (places < count)).all()):
        raise RuntimeError(f"recfx: sum_rows: places must be from 0 to {count - 1}")
    sums = rows.new_zeros(count, rows.shape[1])
    if rows.device.type == "cpu":
        return sums.index_add_(0, places, rows)
    return sums.index_put_((places,), rows, accumulate=True)
