"""The manifest of an exported file: what is in it, and how ids become rows; JSON text inside the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from recfx.errors import ExportError, short
from recfx.exporter.arguments import Signature
from recfx.exporter.compare_outputs import ModelCall
from recfx.exporter.patterns import Pattern, tensor_names
from recfx.exporter.served_collection import ServedCollection
from recfx.exporter.serving.pool_rows import FORMATS
from recfx.exporter.serving.targets import ServingTarget
from recfx.ir.tables import TableSpec
from recfx.versions import __version__

FORMAT_VERSION = 3
"""The version of the file. A reader refuses files of a later one, and of version 1, which have checksums of tables
alone. Files of version 2 have no ``operators_version``.
"""

HASH_VERSION = 1
"""How ids become rows, by version: murmur3's finalizer for slots, splitmix64's for buckets; see ``recfx/kernels``."""

OPERATOR_VERSIONS = range(1, 4)
"""The versions of recfx's operators in files that can be loaded; new files are of the last one.

TorchScript binds a file's calls to whatever signature they fit, so whoever changes the signature of such an operator,
or what an argument means, adds a version here and in ``kernels/csrc/build/library.cpp``. Since version 2,
``served_lookup`` reads rows that are not pooled, and one row of a bucket for all ids without a row; since version 3,
files for devices call ``pooled_lookup_triton``.
"""

_PLAIN = ("kind", "name", "value", "is_weighted", "type_name")
"""The fields of a pattern that a manifest has as they are."""

_SIGNATURE = ("parameters", "positional", "order", "defaults", "sizes", "exact", "keywords")
"""The fields of a signature that a manifest has as they are."""


def make_manifest(
    call: ModelCall,
    collections: Iterable[ServedCollection],
    version: Mapping[str, Any],
    content: int,
    *,
    portable: bool,
    target: ServingTarget,
) -> str:
    """The JSON text; ``content`` is the CRC-32 of everything in the file, see ``content_checksum``. ``version`` says
    which one the file is, and what of it deltas may change.
    """
    manifest = {
        **_written(content),
        **version,
        "hash_version": HASH_VERSION,
        "portable": portable,
        "operators_version": None if portable else OPERATOR_VERSIONS[-1],
        "format": target.format,
        "target": target.name,
        **{name: getattr(call.signature, name) for name in _SIGNATURE},
        "arguments": [_of_pattern(pattern) for pattern in call.signature.patterns],
        "outputs": tensor_names(call.returns),
        "returns": _of_pattern(call.returns),
        "collections": {served.path: tables_as_described(served) for served in collections},
    }
    return json.dumps(manifest, indent=1)


def rewritten_manifest(manifest: Mapping[str, Any], content: int) -> str:
    """``make_manifest`` for a file that has what another one has, and what this version of recfx writes."""
    return json.dumps({**manifest, **_written(content)}, indent=1)


def _written(content: int) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "content_crc32": f"{content:08x}",
        "recfx_version": __version__,
        "torch_version": torch.__version__.split("+")[0],
    }


def read_manifest(text: object, path: object) -> dict[str, Any]:
    """Parse a manifest, and refuse what this version cannot read."""
    try:
        manifest = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):  # numbers may be too long, and lists too deep
        manifest = None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or type(version) is not int or version < 1:
        raise ExportError(
            f"{path} has no manifest of recfx.",
            reason="not_exported",
            what_to_do="load a file that recfx.export has written.",
        )
    if version == 1:
        raise ExportError(
            f"{path} has format 1, which recfx no longer reads.",
            reason="older_format",
            what_to_do="export the model again with this version.",
        )
    if version > FORMAT_VERSION:
        raise ExportError(
            f"{path} has format {short(version)}, written by recfx {short(manifest.get('recfx_version'))}; "
            f"this is recfx {__version__}, which reads formats up to {FORMAT_VERSION}.",
            reason="newer_format",
            what_to_do="update recfx, or export the model with this version.",
        )
    if type(hashed_by := manifest.get("hash_version")) is not int or hashed_by != HASH_VERSION:
        raise ExportError(
            f"{path} maps ids to rows by hash {short(hashed_by)}, this version by {HASH_VERSION}.",
            reason="other_hash",
            what_to_do="export the model again with this version.",
        )
    return manifest


def without_checksum(text: str) -> str:
    """The text of a manifest, with 0 in the place of the checksum of the content."""
    return re.sub(r'"content_crc32": "[0-9a-f]{8}"', f'"content_crc32": "{0:08x}"', text, count=1)


def pattern_from(described: dict[str, Any]) -> Pattern:
    """The pattern that a manifest describes."""
    items = tuple(pattern_from(item) for item in described["items"])
    return Pattern(keys=tuple(described["keys"]), items=items, **{field: described[field] for field in _PLAIN})


def signature_from(manifest: dict[str, Any]) -> Signature:
    """The signature that a manifest describes; older files lack what has a default."""
    known = {name: manifest[name] for name in _SIGNATURE if name in manifest}
    fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    return Signature(patterns=tuple(map(pattern_from, manifest["arguments"])), **fields)


def _of_pattern(pattern: Pattern) -> dict[str, Any]:
    plain = {field: getattr(pattern, field) for field in _PLAIN}
    return {**plain, "keys": list(pattern.keys), "items": [_of_pattern(item) for item in pattern.items]}


def tables_as_described(served: ServedCollection) -> list[dict[str, Any]]:
    """What a manifest says about the tables of a collection."""
    return [_of_table(served, spec) for spec in served.stored]


def _of_table(served: ServedCollection, spec: TableSpec) -> dict[str, Any]:
    config = spec.hashing if spec.has_index else None
    settings = ("dense_rows", "buckets", "seed", "unseen")
    return {
        "table": spec.name,
        "features": list(spec.feature_names),
        "rows": spec.num_embeddings,
        "dim": spec.embedding_dim,
        "pooling": spec.pooling,
        "stored_as": FORMATS[spec.dtype].name,
        "ids": served.tables[spec.name].ids,
        "hashing": None if config is None else {name: getattr(config, name) for name in settings},
    }
