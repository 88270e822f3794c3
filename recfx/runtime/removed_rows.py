"""A backward must not train a row that its id has lost since the forward: another id may have it by then.

This is so if the id was removed, and if the forward was refused later on and undone.
"""

from __future__ import annotations

from typing import Any

import torch

from recfx.errors import InputError
from recfx.hashing import HashIndex
from recfx.runtime.forwards import Forward


def guard_backward(
    output: torch.Tensor, indexes: list[HashIndex], collection: str, forward: Forward | None = None
) -> None:
    """Make the backward of ``output`` raise if one of ``indexes`` has removed ids by then.

    The backward raises an ``InputError``, ``backward_after_removal`` or ``backward_after_refusal``, before anything is
    updated.

    Args:
        output: the output of a lookup.
        indexes: the indexes of the tables that it read.
        collection: fully qualified name, for the message.
        forward: the one that this is a part of, if it may be undone: not any more after this backward.
    """
    if output.grad_fn is None or not indexes:
        return
    before = [index.removals for index in indexes]

    def check(*gradients: Any) -> None:
        if forward is not None and forward.is_undone:
            raise InputError(
                f"the backward of a forward of table {indexes[0].name!r}, which was undone: a later collection of the "
                "model refused its part of the batch, so the new ids of this part have lost their rows again.",
                reason="backward_after_refusal",
                module_path=collection,
                what_to_do="leave out the whole batch when a collection refuses it, or check batches before the model.",
            )
        now = [index.removals for index in indexes]
        if now != before:
            changed = next(index.name for index, one, other in zip(indexes, before, now, strict=True) if one != other)
            raise InputError(
                f"the backward of a batch of table {changed!r}: ids were removed from its index since the forward, "
                "and their rows may have gone to other ids.",
                reason="backward_after_removal",
                module_path=collection,
                what_to_do="call HashIndex.erase and HashIndex.insert after the backward, not before it.",
            )
        if forward is not None:
            forward.train()

    output.grad_fn.register_prehook(check)
