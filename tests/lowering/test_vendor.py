"""The vendor's form of target ``npu``: what its operators compute, on the CPU."""

import pytest
import torch

from recfx.commandline.doctor.cases import LookupCase
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.lowering.triton.vendor import look_up

CASES = [
    LookupCase([1], 1),
    LookupCase([4, 3], 3, seed=1),
    LookupCase([64, 33, 5], 9, torch.float16, seed=2),
    LookupCase([8, 8], 5, torch.bfloat16, seed=3),
    LookupCase([8, 8], 2, seed=4, longest=0),  # no ids
]


@pytest.mark.parametrize("may_be_absent", [False, True])
@pytest.mark.parametrize("knows_lengths", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bags_are_summed_as_the_reference_does(case: LookupCase, knows_lengths: bool, may_be_absent: bool) -> None:
    rows = case.rows if may_be_absent else case.rows.clamp(min=0)
    lengths = case.borders.diff().tolist() if knows_lengths else ()
    given, of_lookup = (rows, case.offsets), (case.weights, case.table_of_feature)
    for how in ((False, None), (True, None), (False, case.scales)):
        (output,) = look_up(*given, lengths, *of_lookup, *how, False, may_be_absent)
        # Float32 whatever the tables are: sums are not rounded to their dtype.
        torch.testing.assert_close(output, pooled_lookup(*given, *of_lookup, *how), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_that_are_not_pooled_are_copied(case: LookupCase) -> None:
    borders, table = case.borders[:3], case.weights[:1]  # of the two features that share the first table
    rows, lengths = case.rows[: borders[2]], borders.diff().tolist()
    outputs = look_up(rows, borders, lengths, table, [0, 0], False, None, True, True)
    assert [len(output) for output in outputs] == lengths
    assert torch.equal(torch.cat(outputs), pooled_lookup(rows, borders, table, [0, 0], False, None, True))


def test_a_row_that_is_not_a_number_is_read_by_its_own_id_alone() -> None:
    """An id without a row does not read the first row instead."""
    table = torch.tensor([[torch.nan], [2.0]])
    (output,) = look_up(torch.tensor([-1, 1, 0]), torch.tensor([0, 2, 3]), (), [table], [0], False, None, False, True)
    assert (float(output[0]), bool(output[1].isnan())) == (2.0, True)
