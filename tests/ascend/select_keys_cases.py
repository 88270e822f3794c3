"""Keys in another order, fewer, repeated, without ids; bags that are many, long and empty."""

from functools import partial

import torch

from recfx.kernels.route.select_keys import select_keys_reference
from tests.ascend.kernel_case import Call, KernelCase, Place, offsets_of

_PROGRAMS = 3
_LINE = 16
_SIGNATURE = {
    "ids_ptr": "*i64", "weights_ptr": "*fp32", "offsets_ptr": "*i64", "positions_ptr": "*i64", "new_ids_ptr": "*i64",
    "new_weights_ptr": "*fp32", "new_offsets_ptr": "*i64", "num_keys": "i32", "batch_size": "i32",
    "num_new_ids": "i32", "bags_per_program": "i32", "ids_per_program": "i32",
}  # fmt: skip
_DTYPES = {"i64": torch.int64, "i32": torch.int32, "fp32": torch.float32, "fp16": torch.float16}


def cases() -> list[KernelCase]:
    """Without weights, and with weights of two dtypes."""
    return [_case("i64", ""), _case("i32", ""), _case("i64", "fp32"), _case("i32", "fp16")]


def _case(ids: str, weights: str) -> KernelCase:
    make = partial(_call, ids=ids, weights=weights)
    calls = {
        "another order": partial(make, positions=(2, 0, 3, 1), batch_size=5, longest=9),
        "some keys": partial(make, positions=(3, 1), batch_size=7, longest=9),
        "repeats": partial(make, positions=(1, 1, 0), batch_size=4, longest=9),
        "many bags": partial(make, positions=(1, 0), batch_size=1500, longest=2),
        "long bags": partial(make, positions=(3, 0, 2), batch_size=2, longest=1500),
        "one bag": partial(make, positions=(2,), batch_size=1, longest=3),
        "no ids": partial(make, positions=(2, 1), batch_size=3, longest=0),
    }
    signature = _SIGNATURE | {"ids_ptr": f"*{ids}", "new_ids_ptr": f"*{ids}"}
    signature |= dict.fromkeys(("weights_ptr", "new_weights_ptr"), f"*{weights or 'fp32'}")
    name = "-".join(["select_keys", ids, *filter(None, [weights])])
    kernel = "recfx.kernels.route.select_keys_triton:recfx_select_keys"
    return KernelCase(name, kernel, signature, {"WEIGHTED": bool(weights)}, calls, programs=_PROGRAMS)


def _call(place: Place, ids: str, weights: str, positions: tuple[int, ...], batch_size: int, longest: int) -> Call:
    draw = torch.Generator().manual_seed(longest + batch_size)
    lengths = torch.randint(0, longest + 1, (4, batch_size), generator=draw)
    lengths[1] = 0 if batch_size == 7 else lengths[1]  # a key without ids
    given = torch.randint(-(2**31), 2**31 - 1, (int(lengths.sum()),), generator=draw).to(_DTYPES[ids])
    scales = torch.rand(given.numel(), generator=draw).to(_DTYPES[weights]) if weights else None
    offsets = offsets_of(lengths.view(-1))
    count = int(lengths[list(positions)].sum())
    expected = select_keys_reference(given, offsets, list(positions), batch_size, count, scales)
    new_ids, new_offsets, new_weights = (place(torch.full_like(tensor, -7)) for tensor in expected)
    bags_each, ids_each = (-(-number // (_PROGRAMS * _LINE)) * _LINE for number in (len(positions) * batch_size, count))
    arguments = [
        place(given), place(torch.zeros(1) if scales is None else scales), place(offsets),
        place(torch.tensor(positions)), new_ids, new_weights, new_offsets,
        len(positions), batch_size, count, bags_each, ids_each,
    ]  # fmt: skip
    return Call(arguments, dict(zip(("new_ids_ptr", "new_offsets_ptr", "new_weights_ptr"), expected, strict=True)))
