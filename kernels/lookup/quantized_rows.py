"""Rows of 8-bit or 4-bit codes: the bytes that FBGEMM's inference operator reads, in ATen.

A row is, in this order:

    scale     float16, 2 bytes, little-endian
    bias      float16, 2 bytes
    codes     8 bits: a byte per column. 4 bits: two columns per byte, the even one in the low half
    padding   up to a multiple of the row alignment

and ``value = code * scale + bias``. It is the layout of ``IntNBitTableBatchedEmbeddingBagsCodegen`` with its default
``scale_bias_size_in_bytes=4`` and ``reverse_qparam=False``, which is what
``fbgemm::int_nbit_split_embedding_codegen_lookup_function`` reads, and what ``split_embedding_weights_with_scale_bias``
of that class takes apart. TorchRec's quantized collections hold their tables in it.

FBGEMM has other layouts, which this is not: ``FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf`` and
``quantized::embedding_bag_4bit_prepack`` write the same scale, bias and codes, but the codes come first;
``FloatToFused8BitRowwiseQuantized`` and ``quantized::embedding_bag_byte_prepack`` put a float32 scale and bias behind
the codes.

The width of a 4-bit row may be odd here, which FBGEMM refuses: the high half of the last byte is 0 then and means
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (8, 4)


def row_bytes(dim: int, bits: int, row_alignment: int = 1) -> int:
    """How many bytes a row of ``dim`` columns takes. FBGEMM aligns rows to 1 byte on the CPU, and to 16 elsewhere."""
    used = 4 + (dim * bits + 7) // 8
    return (used + row_alignment - 1) // row_alignment * row_alignment


def quantize_rows(weight: Tensor, bits: int, row_alignment: int = 1) -> Tensor:
    """Quantize every row over its own range, from its minimum to its maximum, as FBGEMM does to the byte
    (but for the sign of a bias of zero where a row has zeros of both signs).

    ``weight`` has floats, all of them finite, and ``dim`` is at least 1. Returns uint8
    ``[rows, row_bytes(dim, bits, row_alignment)]`` on its device; padding is 0.
    """
    dim = weight.size(1)
    most, values = 2**bits - 1, weight.float()
    bias = values.amin(dim=1, keepdim=True).half()
    span = values.amax(dim=1, keepdim=True) - bias.float()
    scale = torch.where(span == 0, 1.0, span / most).half()
    inverse = 1.0 / scale.float()
    no_scale = torch.isinf(inverse)  # less than float16 can hold: all codes are 0 or nearly so
    scale, inverse = torch.where(no_scale, 1.0, scale), torch.where(no_scale, 1.0, inverse)
    codes = ((values - bias.float()) * inverse).round().clamp(0, most).to(torch.uint8)
    if bits == 4:
        codes = torch.nn.functional.pad(codes, (0, dim % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    used = torch.cat([torch.cat([scale, bias], dim=1).view(torch.uint8), codes], dim=1)
    return torch.nn.functional.pad(used, (0, row_bytes(dim, bits, row_alignment) - used.size(1)))


def dequantize_rows(table: Tensor, dim: int, bits: int) -> Tensor:
    """The values, float32 ``[rows, dim]``, of quantized rows, uint8 ``[rows, row_bytes]``."""
    codes, scale, bias = codes_and_range(table, dim, bits)
    return codes * scale + bias


def codes_and_range(table: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes ``[rows, dim]``, scale and bias (both ``[rows, 1]``) of quantized rows, all float32."""
    # A copy: scale and bias of a table may lie at odd addresses.
    range_of = table[:, :4].clone(memory_format=torch.contiguous_format).view(dtype=torch.float16).float()
    codes = table[:, 4 : row_bytes(dim, bits)]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, :dim]
    return codes.float(), range_of[:, :1], range_of[:, 1:]
