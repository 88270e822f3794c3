"""The operator that pools quantized rows: ``opcheck``, odd addresses and empty batches."""

from __future__ import annotations

import pytest
import torch

from recfx.kernels.lookup.quantized_lookup import quantized_lookup_reference, quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import BITS, quantize_rows


@pytest.mark.parametrize("bits", BITS)
def test_a_table_at_an_odd_address(bits: int) -> None:
    """Scale and bias are not read as whole numbers then, though rows have an even length."""
    table = quantize_rows(torch.randn(3, 6), bits, 2)
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), table.flatten()])[1:].view(table.shape)
    assert odd.data_ptr() % 2 == 1
    arguments = (torch.tensor([2, 0]), torch.tensor([0, 2]), [odd], [6], bits, [0], False, None)
    assert torch.equal(quantized_lookup_triton(*arguments), quantized_lookup_reference(*arguments))


def test_opcheck() -> None:
    tables = [quantize_rows(torch.randn(4, dim), 4) for dim in (5, 8)]
    rows, offsets = torch.tensor([3, -1, 0, 2]), torch.tensor([0, 1, 2, 4, 4])
    for mean, scales in ((False, None), (True, torch.rand(4))):
        torch.library.opcheck(quantized_lookup_triton, (rows, offsets, tables, [5, 8], 4, [0, 1], mean, scales))
