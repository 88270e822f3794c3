"""All kernels lowered, and compiled by BiSheng's compiler, once per run of tests."""

from functools import cache

from tests.ascend import tools
from tests.ascend.cases import ON_ASCEND
from tests.ascend.hivm import Compiled, compile_to_hivm
from tests.ascend.kept import kept
from tests.ascend.lower import Lowered, LoweringError, lower


@cache
def _all() -> dict[str, Lowered | LoweringError]:
    return kept("lowered", lambda: lower(ON_ASCEND, tools.triton_ascend_folder()))


def lowered(name: str) -> Lowered:
    """One compiled form; skips the test where triton-ascend is missing.

    Raises:
        LoweringError: triton-ascend refuses the kernel.
    """
    tools.triton_ascend().require()
    form = _all()[name]
    if isinstance(form, LoweringError):
        raise form
    return form


@cache
def compiled(name: str, version: str) -> Compiled:
    """One compiled form, by one version of ascendnpu-ir; skips the test where something is missing."""
    linalg = lowered(name).linalg
    tools.ascendnpu_ir(version).require()
    return kept(f"{name}-{version}", lambda: compile_to_hivm(linalg, tools.bishengir_compile(version)))
