"""Room for Python's frames, which lie in chunks of 16 kB.

A loop that happens to call functions across the end of a chunk maps memory at each call, and gives it back: twice as
slow as the same loop a few calls higher. A frame that asks for a stack of megabytes gets a chunk that is larger still,
of which only what is used is ever memory.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def with_room(run: Callable[Given, Answer], /, *arguments: Given.args, **named: Given.kwargs) -> Answer:
    """``run(*arguments, **named)``, in the chunk of this call: 4 MB for what ``run`` calls."""
    return run(*arguments, **named)


with_room.__code__ = with_room.__code__.replace(co_stacksize=1 << 19)
