"""Repeat calls of operators that were recorded on another path or machine: results must have the same bits.

    python repeat_calls.py LIBRARY RECORDED

It imports torch alone, so that it also runs where importing more would take minutes.
"""

import copy
import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Call = tuple[str, Any, Any]
"""The operator's name, its arguments before the call, and what it returned, with its arguments after the call."""


def differs(call: Call) -> bool:
    """Whether a call has other results now. NaN equals NaN: its sign and payload are the processor's choice."""
    name, (arguments, keywords), recorded = call
    given = copy.deepcopy(arguments)
    returned = getattr(torch.ops.recfx, name)(*given, **keywords)
    pairs = zip(tree_leaves((returned, given)), tree_leaves(recorded), strict=True)
    return not all(_same(value, expected) for value, expected in pairs)


def _same(value: object, expected: object) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return value == expected
    return (
        value.dtype == expected.dtype and value.shape == expected.shape and torch.equal(_bits(value), _bits(expected))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.contiguous().view(-1).view(torch.uint8)


def main(library: str, recorded: str) -> int:
    torch.ops.load_library(library)
    torch.set_num_threads(2)
    calls: list[Call] = torch.load(recorded, weights_only=True)
    different = Counter(call[0] for call in calls if differs(call))
    print(f"path {torch.ops.recfx.cpu_capability()}: {len(calls)} calls, {different.total()} with other results")
    for name, count in sorted(Counter(name for name, _, _ in calls).items()):
        print(f"  {name}: {count}, {different[name]} with other results")
    return different.total() > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
