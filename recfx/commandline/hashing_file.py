"""The file of ``--hashing``: the settings of ``HashConfig`` as JSON.

``{"on_full": "share"}`` is for all tables, ``{"tables": {"users": {"rows": 1000000}, "movies": null}}`` for each of
some, where null leaves a table static, as ``hashing=None`` does. Keys that are left out have their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from recfx.api import HashConfig
from recfx.errors import ConversionError
from recfx.planner.json_file import JsonFile

_ADVICE = (
    'write {"on_full": "share"} for all tables, or {"tables": {"users": {"on_full": "share"}}} for each of some, '
    "together with --raw-ids: a table that takes no new ids uses no such setting."
)


def read_hashing(
    path: Path, raw_ids: bool, tables: Callable[[], Iterable[str]]
) -> HashConfig | dict[str, HashConfig | None]:
    """What is in the file, as ``convert`` takes it.

    Args:
        path: the file.
        raw_ids: where the file does not give ``dense_rows``, it is 0, as in ``HashConfig.raw_ids()``.
        tables: gives the names of the model's tables; the file may name others, which ``convert`` refuses.

    Raises:
        ConversionError: ``invalid_file``, which says where.
    """
    file = JsonFile(path, _ADVICE)
    content = file.object(file.content, "")
    rest: dict[str, Any] = {"dense_rows": 0} if raw_ids else {}
    if "tables" not in content:
        return _config(file, rest | content, "")
    named = file.fields(content, "", {"tables": dict})["tables"]
    configs: dict[str, HashConfig | None] = {name: HashConfig(**rest) for name in tables()}
    return configs | {
        name: None if given is None else _config(file, rest | file.object(given, f"tables.{name}"), f"tables.{name}")
        for name, given in named.items()
    }


def _config(file: JsonFile, settings: dict[str, Any], where: str) -> HashConfig:
    known = HashConfig.__dataclass_fields__
    if unknown := next((name for name in settings if name not in known), None):
        raise file.refused(where, f"has an unknown key {unknown!r}; the known keys here are: {', '.join(known)}")
    try:
        return HashConfig(**settings)
    except ConversionError as error:
        raise file.refused(where, f"cannot be: {error.message} {error.what_to_do}".rstrip(".")) from error
