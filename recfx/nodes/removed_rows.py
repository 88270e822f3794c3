"""A backward must not train a row that its id has lost since the forward: another id may have it by then."""

from __future__ import annotations

from typing import Any

import torch

from recfx.errors import InputError
from recfx.hashing import HashIndex


def guard_backward(output: torch.Tensor, indexes: list[HashIndex], collection: str) -> None:
    """Make the backward of ``output`` raise if one of ``indexes`` has removed ids by then.

    The backward raises an ``InputError``, ``backward_after_removal``, before anything is updated.

    Args:
        output: the output of a lookup.
        indexes: the indexes of the tables that it read.
        collection: fully qualified name, for the message.
    """
    if output.grad_fn is None or not indexes:
        return
    before = [index.removals for index in indexes]

    def check(*gradients: Any) -> None:
        changed = [index.name for index, count in zip(indexes, before, strict=True) if index.removals != count]
        if changed:
            raise InputError(
                f"the backward of a batch of table {changed[0]!r}: ids were removed from its index since the forward, "
                "and their rows may have gone to other ids.",
                reason="backward_after_removal",
                module_path=collection,
                what_to_do="call HashIndex.erase and HashIndex.insert after the backward, not before it.",
            )

    output.grad_fn.register_prehook(check)
