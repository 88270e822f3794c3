"""Files whose records were changed by someone who took care of the archive's own checksums."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

Records = dict[str, bytes]
ChangeRecords = Callable[[Records], Records]


def rewrite(path: Path, target: Path, change: ChangeRecords) -> None:
    """Write the archive at ``path`` again, with other records."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(target, "w") as new:
        for name, content in change(records).items():
            new.writestr(name, content)


def swapped(records: Records) -> Records:
    """Two tensors of the same size change places."""
    tensors = _tensors(records)
    for first in tensors:
        for second in tensors:
            if len(records[first]) == len(records[second]) and records[first] != records[second]:
                return {**records, first: records[second], second: records[first]}
    raise AssertionError("no two tensors have the same size")


def with_another(records: Records) -> Records:
    """One tensor has another value."""
    name = max(_tensors(records), key=lambda each: len(records[each]))
    return {**records, name: bytes([records[name][0] ^ 1]) + records[name][1:]}


def without_one(records: Records) -> Records:
    """One record is gone."""
    name = _tensors(records)[0]
    return {each: content for each, content in records.items() if each != name}


def _tensors(records: Records) -> list[str]:
    found = [name for name in records if "/data/" in name or "/constants/" in name]
    return [name for name in found if records[name] and not name.endswith((".pkl", ".json"))]
