"""``python -m tests.tools.ascend.model``: times of the README's workload on an Ascend chip, by a model.
Nothing was timed.

It is ``tests.tools.ascend.chip_model``, for the kernels alone: not for what sorts their ids, or for other operators.
With ``--write``, the table goes into ``kernels/README.md``.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from recfx.kernels.build.tiling import ASCEND_910B
from tests.tools.ascend.chip_model import ASSUMPTIONS, MIDDLE, Assumptions, Modelled, modelled_form
from tests.tools.ascend.per_row import Form, FormWork, row_work

COMMAND = "python -m tests.tools.ascend.model"
README = Path(__file__).resolve().parents[3] / "kernels/README.md"
_BEGIN, _END = f"<!-- written by `{COMMAND} --write`: -->", "<!-- the table ends here -->"
BEFORE = Path(__file__).with_name("row_work_before.txt")
TABLES, ROWS, DIM, BATCH, IDS_PER_BAG = 26, 100_000, 64, 2048, 10
POSITIONS = TABLES * BATCH * IDS_PER_BAG
TOUCHED = TABLES * ROWS * (1 - (1 - 1 / ROWS) ** (BATCH * IDS_PER_BAG))
"""Rows that are stepped, if ids are drawn evenly."""
LAUNCHES: Mapping[str, tuple[Form, float]] = {
    "forward": (Form("recfx_pooled_lookup", "", "fp32", 64, ""), TABLES * BATCH),
    "8-bit forward": (Form("recfx_quantized_lookup", "", "int8", 64, ""), TABLES * BATCH),
    "SGD step": (Form("recfx_fused_step", "sgd", "fp32", 64, ""), TOUCHED),
    "Adagrad step": (Form("recfx_fused_step", "adagrad", "fp32", 64, ""), TOUCHED),
}


def answer(name: str, version: str, assumed: Assumptions, before: bool = False) -> Modelled:
    """Of one launch, with one version of the compiler; ``before``: as the kernel was."""
    form, more = LAUNCHES[name]
    works: dict[str, FormWork] = {work.compiler: work for work in row_work(*[BEFORE] * before)[form]}
    return modelled_form(form, works[version], POSITIONS, more, DIM, ASCEND_910B, assumed)


def table() -> str:
    """In Markdown."""
    heads = [
        "",
        "ascendnpu-ir",
        "rows in flight",
        "before, middle",
        *(assumed.name for assumed in ASSUMPTIONS),
        "binds",
    ]
    rows = [heads, ["---"] * len(heads)]
    for name, (form, _) in LAUNCHES.items():
        for work in row_work()[form]:
            version = work.compiler
            answers = [answer(name, version, assumed) for assumed in ASSUMPTIONS]
            former, middle = answer(name, version, MIDDLE, before=True), answers[ASSUMPTIONS.index(MIDDLE)]
            cells = [name, version, f"{work.row.rows_in_flight:.2g}", *map(_cell, [former, *answers]), middle.binds]
            rows.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cell(time: Modelled) -> str:
    return f"{time.seconds * 1e3:.2g} ms, {time.share:.1%}"


def with_table(text: str) -> str:
    """The text with the table in its place."""
    return re.sub(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", f"{_BEGIN}\n\n{table()}\n\n{_END}", text, flags=re.DOTALL)


def main() -> None:
    if "--write" in sys.argv[1:]:
        README.write_text(with_table(README.read_text()))
    print(
        f"A model; nothing was timed on a chip. {ASCEND_910B.name}, {TABLES} tables of {ROWS:,} x {DIM} in float32, "
        f"{BATCH:,} samples, {IDS_PER_BAG} ids per bag: the time of a kernel, and its share of the memory's bandwidth."
    )
    print(table())


if __name__ == "__main__":
    main()
