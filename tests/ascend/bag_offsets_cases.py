"""Lengths and offsets that are right, and that are wrong in every way; ids in range and out of it."""

from functools import partial

import torch

from recfx.kernels.lookup.bag_offsets import LARGEST
from tests.ascend.kernel_case import Call, KernelCase, Place

_PROGRAMS = 3
_LINE = 16
_SIGNATURE = {
    "bags_ptr": "*i64", "ends_ptr": "*i32", "ids_ptr": "*i64", "first_bags_ptr": "*i64", "limits_ptr": "*i64",
    "offsets_ptr": "*i64", "reports_ptr": "*i64", "num_bags": "i32", "num_ids": "i32", "num_keys": "i32",
    "bags_per_program": "i32", "ids_per_program": "i32",
}  # fmt: skip
_DTYPES = {"i64": torch.int64, "i32": torch.int32}
_PER_KEY = (5, 0, 7, 4)


def cases() -> list[KernelCase]:
    """In both dtypes of bags and of ids."""
    return [_case(bags, ids, are_offsets) for bags in _DTYPES for ids in _DTYPES for are_offsets in (False, True)]


def _case(bags: str, ids: str, are_offsets: bool) -> KernelCase:
    make = partial(_call, bags=bags, ids=ids, are_offsets=are_offsets)
    calls = {
        "ordinary": partial(make, longest=9),
        "many bags": partial(make, longest=1, per_key=(700, 1000)),
        "long bags": partial(make, longest=400),
        "one bag": partial(make, longest=9, per_key=(1,)),
        "no ids": partial(make, longest=0),
        "any ids": partial(make, longest=9, limits=(-1, -1, -1, -1)),
        **{f"id {bad}": partial(make, longest=9, bad_id=bad) for bad in (-1, 20, 2**31 - 1, -(2**31))},
        "too few ids": partial(make, longest=9, missing=1),
        "too many ids": partial(make, longest=9, missing=-1),
        **{f"length {bad}": partial(make, longest=9, bad=bad) for bad in (-1, 100, 2**31 - 1, -(2**31))},
    }
    if ids == "i64":
        calls |= {f"id {bad}": partial(make, longest=9, bad_id=bad) for bad in (2**32, 2**63 - 1, -(2**63))}
    if bags == "i64":
        calls |= {f"length {bad}": partial(make, longest=9, bad=bad) for bad in (2**32, 2**63 - 1, -(2**63))}
    if are_offsets:
        calls |= {f"from {first} on": partial(make, longest=9, first=first) for first in (5, -3)}
    name = "-".join(["bag_offsets", bags, ids, *["offsets"] * are_offsets])
    kernel = "recfx.kernels.lookup.bag_offsets_triton:recfx_bag_offsets"
    signature = _SIGNATURE | {"bags_ptr": f"*{bags}", "ids_ptr": f"*{ids}"}
    return KernelCase(name, kernel, signature, {"ARE_OFFSETS": are_offsets}, calls, programs=_PROGRAMS)


def _call(
    place: Place, bags: str, ids: str, are_offsets: bool, longest: int, per_key: tuple[int, ...] = _PER_KEY,
    limits: tuple[int, ...] = (20, 3, -1, 30), bad_id: int | None = None, bad: int | None = None, missing: int = 0,
    first: int = 0,
) -> Call:  # fmt: skip
    draw = torch.Generator().manual_seed(longest)
    count, limits = sum(per_key), limits[: len(per_key)]
    lengths = torch.randint(int(longest > 1), longest + 1, (count,), generator=draw)
    is_wrong = bad is not None or missing != 0 or first < 0  # ids are not checked: it is not known whose they are
    if is_wrong:
        limits = (-1,) * len(per_key)
    asked = torch.cat(
        [
            torch.randint(0, limit if limit > 0 else 50, (int(of_key.sum()),), generator=draw)
            for limit, of_key in zip(limits, lengths.split(per_key), strict=True)
        ]
    ).to(_DTYPES[ids])
    if bad_id is not None:
        asked[7] = bad_id
    given = torch.cat([torch.tensor([first]), first + lengths.cumsum(0)]) if are_offsets else lengths
    if bad is not None:
        given[3] = bad
    asked = asked[: asked.numel() - missing] if missing > 0 else torch.cat([asked, asked[:-missing]])
    given = given.to(_DTYPES[bags])
    first_bags = torch.tensor([0, *per_key]).cumsum(0)
    per_program, ids_each = (-(-number // (_PROGRAMS * _LINE)) * _LINE for number in (count, asked.numel()))
    # Two numbers in int32, which wrap around.
    ends = given[1:].int() - given[0].int() if are_offsets else given.cumsum(0, dtype=torch.int32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends.long()])
    borders = (given.long() - given[0].long() if are_offsets else offsets)[first_bags]
    wrong = [
        int(ends[-1]) != asked.numel()
        or _is_wrong_run(given, ends, are_offsets, asked.numel(), program * per_program, (program + 1) * per_program)
        or _some_are_beyond(asked, borders.tolist(), limits, program * ids_each, (program + 1) * ids_each)
        for program in range(_PROGRAMS)
    ]
    reports = torch.cat([borders, torch.tensor(wrong, dtype=torch.int64)])
    arguments = [
        place(given), place(ends), place(asked), place(first_bags), place(torch.tensor(limits)),
        place(torch.full_like(offsets, -7)), place(torch.full_like(reports, -7)), count, asked.numel(), len(per_key),
        per_program, ids_each,
    ]  # fmt: skip
    return Call(arguments, {"offsets_ptr": offsets, "reports_ptr": reports})


def _is_wrong_run(
    given: torch.Tensor, ends: torch.Tensor, are_offsets: bool, ids: int, begin: int, end: int
) -> bool:  # fmt: skip
    """What a program sees of its bags."""
    run = given[begin : min(end, ends.numel()) + are_offsets] if begin < ends.numel() else given[:0]
    if any(not 0 <= number <= LARGEST for number in run.tolist()):
        return True
    if are_offsets:
        return bool((run.diff() < 0).any())
    return any(not 0 <= number <= ids for number in ends[begin:end].tolist())


def _some_are_beyond(ids: torch.Tensor, borders: list[int], limits: tuple[int, ...], begin: int, end: int) -> bool:
    """What a program sees of its ids."""
    of_keys = zip(borders[:-1], borders[1:], limits, strict=True)
    runs = [(ids[max(begin, first) : min(end, last)].tolist(), limit) for first, last, limit in of_keys if limit >= 0]
    return any(not 0 <= id_ < limit for run, limit in runs for id_ in run)
