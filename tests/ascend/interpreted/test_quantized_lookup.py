"""The operator that pools quantized rows: odd addresses."""

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
