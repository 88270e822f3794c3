"""All kernels lowered, once per run of tests."""

from __future__ import annotations

from functools import cache

from tests.ascend import tools
from tests.ascend.cases import CASES
from tests.ascend.lower import Lowered, LoweringError, lower


@cache
def _all() -> dict[str, Lowered | LoweringError]:
    return lower(CASES, tools.triton_ascend_folder())


def lowered(name: str) -> Lowered:
    """One compiled form; skips the test where triton-ascend is missing.

    Raises:
        LoweringError: triton-ascend refuses the kernel.
    """
    tools.triton_ascend().require()
    found = _all()[name]
    if isinstance(found, LoweringError):
        raise found
    return found
