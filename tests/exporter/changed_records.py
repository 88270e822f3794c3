"""Files whose records were changed by someone who took care of the archive's own checksums."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

from recfx.exporter.manifest import without_checksum
from recfx.exporter.model_file import MANIFEST_RECORD, content_checksum

Records = dict[str, bytes]
ChangeRecords = Callable[[Records], Records]


def rewrite(path: Path, target: Path, change: ChangeRecords) -> None:
    """Write the archive at ``path`` again, with other records."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(target, "w") as new:
        for name, content in change(records).items():
            new.writestr(name, content)


def forge(path: Path, target: Path, change: ChangeRecords) -> None:
    """The same, by someone who took care of the checksum in the manifest as well."""
    rewrite(path, target, change)
    with zipfile.ZipFile(target) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(MANIFEST_RECORD))
        text = archive.read(name).decode()
        content = content_checksum(archive, without_checksum(text))
    rewrite(
        target,
        target,
        lambda records: {**records, name: without_checksum(text).replace(f'"{0:08x}"', f'"{content:08x}"', 1).encode()},
    )


def with_manifest(**fields: object) -> ChangeRecords:
    """Some fields of the manifest are others; those that are None are gone."""

    def change(records: Records) -> Records:
        (name,) = (entry for entry in records if entry.endswith(MANIFEST_RECORD))
        manifest = {**json.loads(records[name]), **fields}
        text = json.dumps({key: value for key, value in manifest.items() if value is not None}, indent=1)
        return {**records, name: text.encode()}

    return change


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
    name = max(_tensors(records), key=lambda entry: len(records[entry]))
    return {**records, name: bytes([records[name][0] ^ 1]) + records[name][1:]}


def without_one(records: Records) -> Records:
    """One record is gone."""
    name = _tensors(records)[0]
    return {entry: content for entry, content in records.items() if entry != name}


def _tensors(records: Records) -> list[str]:
    names = [name for name in records if "/data/" in name or "/constants/" in name]
    return [name for name in names if records[name] and not name.endswith((".pkl", ".json"))]
