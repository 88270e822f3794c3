"""What ``convert`` refuses to do, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from recfx.collections.converted_collection import ConvertedCollection
from recfx.conversion.replacement.replace_collections import Hashing, config_for
from recfx.discovery.classify import CONVERTED, EMBEDDING_COLLECTION, KEPT, REFUSED
from recfx.discovery.discover import Discovery
from recfx.errors import ConversionError
from recfx.hashing import HashConfig
from recfx.passes import Pass

DEFAULT_HASHING = HashConfig()
"""The default of ``hashing=``, told apart by identity: an equal config from the user counts as a request."""


def refuse_unsupported(discovery: Discovery, on_unsupported: str) -> None:
    """Refuse a collection that cannot be converted, unless the user wants it kept, and a model without collections."""
    refused = discovery.of(REFUSED)
    if refused and on_unsupported == "error":
        first = refused[0]
        others = f" ({len(refused) - 1} more cannot be converted either)" if len(refused) > 1 else ""
        assert first.why is not None
        raise ConversionError.of(replace(first.why, message=first.why.message + others))
    if not discovery.findings:
        raise ConversionError(
            "there is no EmbeddingBagCollection in the model.",
            reason="no_collection",
            what_to_do="pass the model that holds the torchrec.EmbeddingBagCollection, before it is scripted, "
            "traced or exported.",
        )


def refuse_raw_ids_of_kept(discovery: Discovery, replacements: Mapping[int, nn.Module]) -> None:
    """Refuse raw ids for the whole model if some collections stay as they are: these would take the ids for rows."""
    collections = [each for each in replacements.values() if isinstance(each, ConvertedCollection)]
    raw = [table for collection in collections for table in collection.tables_with_index()]
    for finding in discovery.of(KEPT):
        if raw and finding.reason == EMBEDDING_COLLECTION:
            configs: list[Any] = getattr(finding.module, "embedding_configs", list)()
            names = ", ".join(repr(config.name) for config in configs) or "its tables"
            raise ConversionError(
                f"hashing= makes the whole model take raw ids, but {type(finding.module).__name__} is not converted: "
                f"its tables ({names}) would take them for rows.",
                reason="raw_ids_of_kept_tables",
                module_path=finding.path,
                what_to_do=f"name the tables, hashing={{{raw[0]!r}: HashConfig(...)}}; or, if the kept tables get "
                "row numbers anyway, pass on_unsupported='keep'.",
            )


def refuse_other_request(discovery: Discovery, hashing: Hashing, backend: str, passes: tuple[Pass, ...] | None) -> None:
    """Converting twice is a no-op; asking for something different the second time is an error."""
    for finding in discovery.of(CONVERTED):
        converted: Any = finding.module  # sharded ones remember the request too
        other = [
            table
            for table, requested in converted.requested.items()
            if hashing is not DEFAULT_HASHING and config_for(table, hashing) != requested
        ]
        if other:
            what = f"a different hashing of table {other[0]!r}"
        elif backend not in ("auto", converted.backend):
            what = f"backend {backend!r}"
        elif passes is not None and passes != converted.passes:
            what = "other passes"
        else:
            what = ""
        if what:
            raise ConversionError(
                f"the collection is already converted, and this call asks for {what}.",
                reason="already_converted",
                module_path=finding.path,
                what_to_do="call recfx.unconvert first, then convert as you want it.",
            )


def refuse_sharded(discovery: Discovery) -> None:
    """Refuse to shard again: a rank has only its own shards, from which no other plan can be made."""
    for finding in discovery.of(CONVERTED):
        if isinstance(finding.module, ConvertedCollection) and finding.module.is_sharded:
            raise ConversionError(
                "the collection is sharded already.",
                reason="already_sharded",
                module_path=finding.path,
                what_to_do="leave out plan= and env=; for a different plan, build the model anew, convert it with that "
                "plan, and load the state of this one.",
            )
