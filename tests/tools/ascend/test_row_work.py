"""The model of a chip says what follows from what compiled kernels do per row, which is counted again."""

import pytest

from tests.ascend import tools
from tests.ascend.cases import BY_NAME, ON_ASCEND
from tests.ascend.hivm import compile_to_hivm
from tests.ascend.lowered import compiled, lowered
from tests.tools.ascend.chip_model import ASSUMPTIONS, parts_of
from tests.tools.ascend.hivm_program import program_of
from tests.tools.ascend.model import COMMAND, README, table, with_table
from tests.tools.ascend.per_row import row_work
from tests.tools.ascend.row_work import IDS_PER_BAG, count, follow, form_of, misfit

each_version = pytest.mark.parametrize("version", tools.ASCENDNPU_IR)
WITH_ROWS = [case.name for case in ON_ASCEND if form_of(case) is not None]
FOLLOWED = [
    "pooled_lookup-fp32-block_64", "pooled_lookup-fp32-block_1024-weighted", "gather_rows-fp32-block_64",
    "quantized_lookup-int8-block_64-fp32",
    "fused_step-sgd-fp32-block_64-undecayed", "fused_step-adagrad-fp32-block_64-undecayed",
    "fused_step-rowwise_adagrad-fp32-block_64-undecayed", "per_sample_weight_gradients-fp32-block_64",
]  # fmt: skip
_TRIES = 16
"""The older compiler does not place waits in the same way every time."""


def test_every_kernel_with_rows_was_counted() -> None:
    assert {form_of(BY_NAME[name]) for name in WITH_ROWS} == set(row_work())
    assert all(tuple(work.compiler for work in works) == tools.ASCENDNPU_IR for works in row_work().values())


@each_version
@pytest.mark.parametrize("name", WITH_ROWS)
def test_kernels_do_per_row_what_was_committed(name: str, version: str) -> None:
    case = BY_NAME[name]
    known = {work.compiler: work for work in row_work()[form_of(case)]}[version]
    made = [compiled(name, version)]
    while misfit(count(made[-1].hivm, case, version), known):
        assert len(made) < _TRIES, "`python -m tests.tools.ascend.row_work` counts again"
        made.append(compile_to_hivm(lowered(name).linalg, tools.bishengir_compile(version)))


@pytest.mark.parametrize(
    ("kernel", "rows"),
    [("recfx_pooled_lookup", 32), ("recfx_quantized_lookup", 32), ("recfx_gather_rows", 8), ("recfx_fused_step", 8)],
)
def test_so_many_rows_are_in_flight(kernel: str, rows: int) -> None:
    """Of 64 columns; wider rows fill the unified buffer sooner."""
    forms = [form for form in row_work() if (form.kernel, form.block) == (kernel, 64)]
    flying = [work.row.rows_in_flight for form in forms for work in row_work()[form]]
    assert flying
    assert min(flying) >= rows


def test_the_readme_has_the_table_of_the_model() -> None:
    text = README.read_text()
    assert table() in text
    assert with_table(text) == text, f"`{COMMAND} --write` writes it again"
    assert "nothing was timed on a chip" in text


@each_version
@pytest.mark.parametrize("name", FOLLOWED)
def test_the_model_says_what_a_followed_core_says(name: str, version: str) -> None:
    """The formula has a few sums; a core that is followed instruction by instruction has the order, too."""
    case, hivm = BY_NAME[name], compiled(name, version).hivm
    program, work, block = program_of(hivm), count(hivm, case, version), case.constexprs["BLOCK_D"]
    if "keys_ptr" in case.signature:
        batches = {(2, 128, False): work.row, (2, 128, True): work.row.plus(work.more, 1)}
    else:
        batches = {(2, 128, True): work.row, (16, IDS_PER_BAG, True): work.row.plus(work.more, 1 / IDS_PER_BAG)}
    for batch, per_row in batches.items():
        bags, per_bag, each_its_own = batch
        larger = (bags, 2 * per_bag, each_its_own) if bags == 2 else (2 * bags, per_bag, each_its_own)
        for assumed in ASSUMPTIONS:
            seconds = [follow(program, case, shape, assumed).seconds for shape in (batch, larger)]
            by_core = (seconds[1] - seconds[0]) / (bags * per_bag)
            by_formula = max(parts_of(per_row, per_row.bytes, block, assumed).values())
            assert by_formula == pytest.approx(by_core, rel=0.35), (batch, assumed.name)
