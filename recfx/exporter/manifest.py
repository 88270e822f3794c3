"""The manifest of an exported file: what is in it, and how ids become rows; JSON text inside the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from recfx.errors import ExportError
from recfx.exporter.arguments import Pattern, Signature
from recfx.exporter.model_call import ModelCall
from recfx.exporter.returns import tensor_names
from recfx.exporter.served_collection import ServedCollection
from recfx.exporter.serving.pool_rows import FORMATS
from recfx.versions import __version__

FORMAT_VERSION = 3
"""The version of the file. A reader refuses files of a later one.

Files of version 1 have no ``content_crc32``, and those of version 2 no ``operators_version``.
"""

HASH_VERSION = 1
"""How ids become rows, by version: murmur3's finalizer for slots, splitmix64's for buckets; see ``recfx/kernels``."""

OPERATOR_VERSIONS = range(1, 3)
"""The versions of recfx's operators in files that can be loaded; new files are of the last one.

TorchScript binds a file's calls to whatever signature they fit, so whoever changes the signature of such an operator,
or what an argument means, adds a version here and in ``kernels/csrc/build/library.cpp``. Since version 2,
``served_lookup`` reads rows that are not pooled, and one row of a bucket for all ids without a row.
"""


def make_manifest(
    call: ModelCall,
    collections: Iterable[ServedCollection],
    crcs: Mapping[str, int],
    content: int,
    portable: bool,
    format: str,
    target: str,
) -> str:
    """The JSON text.

    Args:
        call: what the file was made from.
        collections: the exported collections.
        crcs: the CRC-32 of each big buffer, by name.
        content: the CRC-32 of everything in the file, see ``content_checksum``.
        portable: whether the file needs only the operators of torch and FBGEMM.
        format: as for ``export``.
        target: the name of the ``ServingTarget``.
    """
    signature = call.signature
    manifest = {
        "format_version": FORMAT_VERSION,
        "content_crc32": f"{content:08x}",
        "recfx_version": __version__,
        "torch_version": torch.__version__.split("+")[0],
        "hash_version": HASH_VERSION,
        "portable": portable,
        "operators_version": None if portable else OPERATOR_VERSIONS[-1],
        "format": format,
        "target": target,
        "parameters": list(signature.parameters),
        "positional": signature.positional,
        "order": list(signature.order),
        "defaults": dict(signature.defaults),
        "arguments": [_of_pattern(pattern) for pattern in signature.patterns],
        "outputs": tensor_names(call.returns),
        "returns": _of_pattern(call.returns),
        "crc32": {name: f"{crc:08x}" for name, crc in crcs.items()},
        "collections": {collection.path: _of_collection(collection) for collection in collections},
    }
    return json.dumps(manifest, indent=1)


def read_manifest(text: object, path: object) -> dict[str, Any]:
    """Parse a manifest, and refuse what this version cannot read.

    Args:
        text: the content of the file's ``recfx.json``.
        path: the file, for messages.

    Raises:
        ExportError: ``not_exported``, ``newer_format``, ``other_hash``, ``damaged_file``.
    """
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
    if version > FORMAT_VERSION:
        raise ExportError(
            f"{path} has format {version}, written by recfx {manifest.get('recfx_version')}; "
            f"this is recfx {__version__}, which reads formats up to {FORMAT_VERSION}.",
            reason="newer_format",
            what_to_do="update recfx, or export the model with this version.",
        )
    if manifest.get("hash_version") != HASH_VERSION:
        raise ExportError(
            f"{path} maps ids to rows by hash {manifest.get('hash_version')}, this version by {HASH_VERSION}.",
            reason="other_hash",
            what_to_do="export the model again with this version.",
        )
    try:
        signature_from(manifest)
        returns_from(manifest)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ExportError(
            f"{path} cannot be loaded: its manifest is not one that recfx writes ({type(error).__name__}: {error}).",
            reason="damaged_file",
            what_to_do="export the model again, or copy the file again.",
        ) from error
    return manifest


def without_checksum(text: str) -> str:
    """The text of a manifest, with 0 in the place of the checksum of the content."""
    return re.sub(r'"content_crc32": "[0-9a-f]{8}"', f'"content_crc32": "{0:08x}"', text, count=1)


def signature_from(manifest: dict[str, Any]) -> Signature:
    """The signature that a manifest describes."""
    patterns = tuple(_pattern_from(argument) for argument in manifest["arguments"])
    parameters, positional = _names(manifest["parameters"]), manifest["positional"]
    if len(parameters) != len(patterns) or type(positional) is not int:
        raise ValueError("its arguments have no names")
    order, defaults = _names(manifest.get("order", [])), manifest.get("defaults", {})  # which older files lack
    return Signature(parameters, patterns, positional, order, dict(defaults))


def returns_from(manifest: dict[str, Any]) -> Pattern:
    """The pattern of what the model returns, as a manifest describes it."""
    return _pattern_from(manifest["returns"])


_LEAVES = ("tensor", "kjt", "jagged", "keyed_tensor")
_KINDS = (*_LEAVES, "constant", "dict", "list", "tuple", "dataclass")
_PLAIN = ("kind", "name", "value", "is_weighted", "type_name")


def _of_pattern(pattern: Pattern) -> dict[str, Any]:
    plain = {field: getattr(pattern, field) for field in _PLAIN}
    return {**plain, "keys": list(pattern.keys), "items": [_of_pattern(item) for item in pattern.items]}


def _pattern_from(described: dict[str, Any]) -> Pattern:
    items = tuple(_pattern_from(item) for item in described["items"])
    pattern = Pattern(keys=_names(described["keys"]), items=items, **{field: described[field] for field in _PLAIN})
    if pattern.kind not in _KINDS or not isinstance(pattern.name, str):
        raise ValueError(f"nothing is of kind {pattern.kind!r}")
    if bool(pattern.name) != (pattern.kind in _LEAVES):
        raise ValueError(f"{pattern.name!r} is the name of a {pattern.kind}")
    if (pattern.name or pattern.kind == "constant") and items:
        raise ValueError(f"a {pattern.kind} has items")
    if (pattern.kind in ("dict", "dataclass") or (items and pattern.keys)) and len(pattern.keys) != len(items):
        raise ValueError("its items have no keys")
    return pattern


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("a list of names is something else")
    return tuple(names)


def _of_collection(served: ServedCollection) -> list[dict[str, Any]]:
    described = []
    for spec in served.stored:
        config = spec.hashing
        described.append(
            {
                "table": spec.name,
                "features": list(spec.feature_names),
                "rows": spec.num_embeddings,
                "dim": spec.embedding_dim,
                "pooling": spec.pooling,
                "stored_as": FORMATS[spec.dtype].name,
                "ids": served.tables[spec.name].ids,
                "hashing": None
                if config is None or not spec.has_index
                else {
                    "dense_rows": config.dense_rows,
                    "buckets": config.buckets,
                    "seed": config.seed,
                    "unseen": config.unseen,
                },
            }
        )
    return described
