"""What a trace leaves behind in the user's own objects.

A trace runs the model's code on a copy of its modules. The copy shares helper objects that refer to no module with the
model, and code may put a module of the copy into them: a helper that remembers its collection at the first call, say.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from recfx.collections.copy_modules import replace_in_place
from recfx.discovery.bypass import way_around


def put_back(model: nn.Module, originals: Mapping[int, nn.Module], copies: list[nn.Module]) -> str:
    """Let what ``model`` refers to by other ways than its modules refer to originals again, as if it had run itself.

    Args:
        originals: the module of ``model`` that each copy stands for, by ``id`` of the copy.
        copies: the copies.

    Returns:
        how ``model`` still reaches one of the copies, from a place that cannot be changed; ``""`` if it does not.
    """
    if not way_around(model, copies):
        return ""
    replace_in_place(model, originals)
    return way_around(model, copies)
