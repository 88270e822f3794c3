"""What ``export(quantize=)`` means for each table."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from recfx.errors import ExportError
from recfx.ir.tables import TableSpec

QUANTIZED: dict[str | None, torch.dtype | None] = {
    None: None,
    "fp16": torch.float16,
    "int8": torch.quint8,
    "int4": torch.quint4x2,
}

_KEPT = {torch.float32: torch.float32, torch.float16: torch.float16}
"""The dtype in which rows are stored that are not quantized; rows of other dtypes are stored as float32."""


def stored_dtypes(
    collections: Mapping[str, tuple[TableSpec, ...]], quantize: str | Mapping[str, str | None] | None
) -> dict[str, dict[str, torch.dtype]]:
    """The dtype of stored rows, by collection and table.

    Args:
        collections: the tables of each collection.
        quantize: one of ``QUANTIZED``, or one for each table by name (``<collection>.<table>`` if several collections
            have a table of that name); tables that are not named keep their dtype.

    Raises:
        ExportError: ``invalid_argument``: unknown format or table.
    """
    chosen = quantize if isinstance(quantize, Mapping) else {}
    for choice in chosen.values() if isinstance(quantize, Mapping) else [quantize]:
        if choice is not None and (not isinstance(choice, str) or choice not in QUANTIZED):
            raise ExportError(
                f"quantize={choice!r} is not a format of rows.",
                reason="invalid_argument",
                what_to_do="pass None, 'fp16', 'int8', 'int4', or a dict of these by table.",
            )
    names = {name for path, tables in collections.items() for spec in tables for name in _names(path, spec)}
    unknown = sorted(str(name) for name in chosen if name not in names)
    if unknown:
        raise ExportError(
            f"quantize names table {unknown[0]!r}, which no converted collection has.",
            reason="invalid_argument",
            what_to_do=f"name some of: {', '.join(sorted({s.name for each in collections.values() for s in each}))}.",
        )
    return {
        path: {spec.name: _dtype(path, spec, quantize, chosen) for spec in tables}
        for path, tables in collections.items()
    }


def _names(path: str, spec: TableSpec) -> tuple[str, str]:
    return spec.name, f"{path}.{spec.name}"


def _dtype(
    path: str, spec: TableSpec, quantize: str | Mapping[str, str | None] | None, chosen: Mapping[str, str | None]
) -> torch.dtype:
    short, full = _names(path, spec)
    choice = quantize if not isinstance(quantize, Mapping) else chosen.get(full, chosen.get(short))
    return QUANTIZED[choice] or _KEPT.get(spec.dtype, torch.float32)
