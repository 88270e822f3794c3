"""Quantized rows and their pooled lookup in ATen, against FBGEMM's operators: to the byte, and to the last bits."""

import math

import fbgemm_gpu  # noqa: F401  (loads the operators)
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.kernels.lookup.quantized_lookup import quantized_lookup_reference
from recfx.kernels.lookup.quantized_rows import BITS, dequantize_rows, quantize_rows
from tests.kernels.quantized import lookups

TYPES = {8: SparseType.INT8, 4: SparseType.INT4}
# Not -0.0: which zero of a row is its minimum depends on FBGEMM's vector instructions.
FLOATS = st.floats(-1e4, 1e4, width=32).map(lambda x: x + 0.0) | st.sampled_from(
    [0.0, 1e-8, 1e-6, 6e-5, -1e-30, 1e-42, 6e4, -6e4]
)
SETTINGS = settings(max_examples=150, deadline=None)


@st.composite
def weights(draw: st.DrawFn, multiple: int) -> torch.Tensor:
    """Rows of every range: constant ones, ones too narrow for float16, ones that span all of it."""
    dim = multiple * draw(st.integers(1, 40))
    rows = draw(st.lists(st.lists(FLOATS, min_size=1, max_size=8), min_size=1, max_size=5))
    return torch.tensor([[row[column * 5 % len(row)] for column in range(dim)] for row in rows])


def parts_in_front(fused: torch.Tensor) -> torch.Tensor:
    """Scale and bias, which FBGEMM's quantizer writes behind the codes, before them."""
    return torch.cat([fused[:, -4:], fused[:, :-4]], dim=1)


@SETTINGS
@given(st.data(), st.sampled_from(BITS))
def test_quantizes_as_fbgemm(data: st.DataObject, bits: int) -> None:
    weight = data.draw(weights(multiple=16 // bits))  # FBGEMM takes rows of whole float16s
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight, bits)
    table = quantize_rows(weight, bits)
    assert torch.equal(table, parts_in_front(fused))
    of_fbgemm = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(fused, bits)
    torch.testing.assert_close(dequantize_rows(table, weight.size(1), bits), of_fbgemm, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_values_are_within_a_step(bits: int) -> None:
    """For every dim; float16 rounds scale and bias."""
    draw = torch.Generator().manual_seed(0)
    for dim in (1, 2, 3, 5, 7, 33, 64, 1023, 1024):
        weight = torch.randn(6, dim, generator=draw)
        values = dequantize_rows(quantize_rows(weight, bits), dim, bits)
        steps = (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / (2**bits - 1) + 2e-3
        assert (values - weight).abs().le(steps).all()


def test_bytes_of_a_row() -> None:
    """By hand: scale 1, bias -2, codes 0 to 4."""
    weight = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 13.0]])
    assert quantize_rows(weight, 4, 8).tolist() == [[0x00, 0x3C, 0x00, 0xC0, 0x10, 0x32, 0x0F, 0]]
    weight[0, 4] = 253.0
    assert quantize_rows(weight, 8, 4).tolist() == [[0x00, 0x3C, 0x00, 0xC0, 0, 1, 2, 3, 255, 0, 0, 0]]


def fbgemm_s_lookup(rows, offsets, tables, dims, bits, table_of_feature, mean, scales, alignment):
    blob = torch.cat([table.flatten() for table in tables])
    starts = torch.tensor([0, *(table.numel() for table in tables)]).cumsum(0)[table_of_feature]
    widths = torch.tensor([0, *(dims[table] for table in table_of_feature)]).cumsum(0).to(torch.int32)
    features = len(table_of_feature)
    most = {"max_int8_D": 0, "max_int4_D": 0, f"max_int{bits}_D": max(dims)}
    return torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        dev_weights=blob, uvm_weights=blob[:0], weights_offsets=starts,
        weights_placements=torch.full((features,), EmbeddingLocation.HOST.value, dtype=torch.int32),
        D_offsets=widths, total_D=int(widths[-1]),
        weights_tys=torch.full((features,), TYPES[bits].as_int(), dtype=torch.uint8),
        max_int2_D=0, max_float16_D=0, max_float32_D=0, **most,
        indices=rows.int(), offsets=offsets.int(), pooling_mode=int(mean), indice_weights=scales,
        output_dtype=SparseType.FP32.as_int(), row_alignment=alignment,
    )  # fmt: skip


@pytest.mark.parametrize("bits", BITS)
@SETTINGS
@given(data=st.data())
def test_pools_as_fbgemm(bits: int, data: st.DataObject) -> None:
    *arguments, alignment = data.draw(lookups(bits, multiple=8 // bits))  # FBGEMM takes rows of whole bytes
    pooled = quantized_lookup_reference(*arguments)
    # The difference is in the order of sums of up to 40 values of about 3, and in fused multiplications.
    torch.testing.assert_close(pooled, fbgemm_s_lookup(*arguments, alignment), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dim", [1, 3, 5, 31, 33, 255, 1023])
@pytest.mark.parametrize("bits", BITS)
def test_odd_dims(bits: int, dim: int, mean: bool, weighted: bool) -> None:
    """Value by value from the bytes, in Python; the half of a byte that belongs to no column is never taken for one."""
    draw = torch.Generator().manual_seed(dim)
    table = quantize_rows(torch.randn(4, dim, generator=draw), bits)
    if bits == 4:
        table[:, -1] |= 0xF0
    rows, offsets = torch.tensor([3, -1, 0, 3, 1]), torch.tensor([0, 4, 4, 5])
    scales = torch.randn(5, generator=draw) if weighted else None
    pooled = quantized_lookup_reference(rows, offsets, [table], [dim], bits, [0], mean, scales)
    for bag, members in enumerate(((0, 2, 3), (), (4,))):
        for column in {0, dim // 2, dim - 1}:
            weights = [1.0 if scales is None else float(scales[place]) for place in members]
            values = [value_of(table[rows[place]], column, bits) for place in members]
            expected = math.fsum(weight * value for weight, value in zip(weights, values, strict=True))
            expected /= (4, 1, 1)[bag] if mean else 1
            assert float(pooled[bag, column]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def value_of(row: torch.Tensor, column: int, bits: int) -> float:
    content = bytes(row.tolist())
    code = content[4 + column] if bits == 8 else content[4 + column // 2] >> 4 * (column % 2) & 15
    scale, bias = torch.frombuffer(bytearray(content[:4]), dtype=torch.float16).tolist()
    return code * scale + bias
