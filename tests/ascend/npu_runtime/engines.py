"""Which engine of an NPU an operator runs on, by the table of ``ai_core.md``.

torch_npu's dispatch table says that an operator has a kernel. CANN chooses by dtype whether that kernel is one for the
AI Cores or one for the AI CPU, a few cores on the chip that take milliseconds where AI Cores take microseconds.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("ai_core.md")
HEADER = "| operator | decided by | 910B, 910_93 | 910_95 | 310P | otherwise | source |\n"
CHIPS = ("910B", "910_95", "310P")

AI_CORE, AI_CPU, UNKNOWN, NO_KERNEL = "AI Core", "AI CPU", "unknown", "no kernel"


class Kernels(NamedTuple):
    """A line of the table, for each of its operators.

    Args:
        decided_by: ``first`` argument, ``arguments``, ``result``, or ``all`` tensors: those whose dtypes decide.
        dtypes: of each chip: those with kernels for AI Cores, ``any``, ``none``, ``no kernel`` or ``?``.
        otherwise: the engine of dtypes that are not listed.
    """

    decided_by: str
    dtypes: dict[str, frozenset[str]]
    otherwise: str

    def engine(self, given: Sequence[str], made: Sequence[str], chip: str) -> str:
        """As the function ``engine``, if this is the only line of the operator."""
        listed = self.dtypes[chip]
        if listed in ({NO_KERNEL}, {"?"}):
            return NO_KERNEL if NO_KERNEL in listed else UNKNOWN
        deciding = {"first": given[:1], "arguments": given, "result": made, "all": [*given, *made]}[self.decided_by]
        has_kernel = bool(deciding) and listed.issuperset(deciding)
        return AI_CORE if has_kernel or "any" in listed else self.otherwise


@cache
def read() -> dict[str, list[Kernels]]:
    """The table, by operator with its namespace; AI Core in one of an operator's lines is enough."""
    kernels: defaultdict[str, list[Kernels]] = defaultdict(list)
    for line in TABLE.read_text().partition(HEADER)[2].splitlines()[1:]:
        operators, decided_by, *dtypes, otherwise, _ = (cell.strip() for cell in line.strip("|").split("|"))
        by_chip = {chip: frozenset(cell.split(", ")) for chip, cell in zip(CHIPS, dtypes, strict=True)}
        for operator in operators.replace("`", "").split():
            kernels[f"aten::{operator}"].append(Kernels(decided_by, by_chip, otherwise))
    return dict(kernels)


def engine(operator: str, given: Sequence[str], made: Sequence[str], chip: str = "910B") -> str:
    """``AI Core``, ``AI CPU``, ``unknown``, or ``no kernel`` for views and allocations.

    Args:
        operator: its name, with namespace and overload.
        given: the dtypes (``int64``, ...) of its arguments that are tensors on the NPU.
        made: those of its results.
        chip: one of ``CHIPS``.
    """
    engines = {kernels.engine(given, made, chip) for kernels in read().get(operator, [])}
    return next((name for name in (AI_CORE, NO_KERNEL, AI_CPU) if name in engines), UNKNOWN)
