"""Decides what becomes of each collection of a model, and what is refused: for ``convert``, and for ``explain``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from recfx.collections.copy_modules import copy_modules, refuse_fully_sharded
from recfx.collections.devices import usable_device
from recfx.conversion.check_conversion import check_conversion, compile_dropped, read_but_not_called
from recfx.conversion.declared_ranges import declare_id_ranges
from recfx.conversion.refusals import (
    DEFAULT_HASHING,
    refuse_other_request,
    refuse_raw_ids_of_kept,
    refuse_sharded,
    refuse_unsupported,
)
from recfx.conversion.replacement.conversion_record import Conversion, attach_conversion, conversion_of, recorded
from recfx.conversion.replacement.replace_collections import Hashing, replace_collections
from recfx.conversion.replacement.resize_tables import TableResizing
from recfx.discovery.classify import CONVERTED, CONVERTIBLE, Finding
from recfx.discovery.discover import Discovery, check_module, discover
from recfx.discovery.sample import Sample
from recfx.errors import ConversionError, Diagnostic, type_of
from recfx.passes import Pass


@dataclass(frozen=True)
class Request:
    """What the user asks for. The fields are the arguments of ``convert``.

    Args:
        shards: whether there is a plan, or an environment to make one for.
    """

    hashing: Hashing = DEFAULT_HASHING
    backend: str = "auto"
    device: torch.device | str | None = None
    verify: bool | None = None
    inplace: bool = False
    on_unsupported: str = "error"
    id_ranges: Mapping[str, tuple[int, int]] | None = None
    passes: tuple[Pass, ...] | None = None
    shards: bool = False

    @property
    def keeps(self) -> bool:
        """Whether collections that cannot be converted stay as they are."""
        return self.on_unsupported == "keep"


@dataclass
class Decision:
    """What becomes of a model.

    Args:
        discovery: its collections. Those that turned out not to be convertible are refused in it.
        replacements: the converted collections, by ``id`` of the original.
        conversion: the record; None if everything is converted already, or if something is refused.
        converted: the model with the replacements, not sharded and not moved yet; None if ``conversion`` is.
        refusals: what is refused, in the order in which it was found; empty where the first one is raised.
    """

    discovery: Discovery
    replacements: dict[int, nn.Module] = field(default_factory=dict)
    conversion: Conversion | None = None
    converted: nn.Module | None = None
    refusals: list[Diagnostic] = field(default_factory=list)


def decide(
    model: nn.Module,
    call: Sample | None,
    asked: Request,
    resizing: TableResizing,
    *,
    raises: bool = True,
    kept_before: Callable[[Finding], Diagnostic | None] | None = None,
    done: Callable[[str], None] = lambda stage: None,
) -> Decision:
    """What becomes of ``model``, which does not change, except for tables that ``resizing`` gives more rows.

    Args:
        model: any module; it has been through ``check_request``.
        call: one call of it. With it, the result is compared with the original as ``asked.verify`` says.
        asked: what the user asks for.
        resizing: takes the rows back, unless its caller keeps them.
        raises: raise the first refusal, instead of listing all.
        kept_before: why an earlier conversion kept a collection that could be converted by default.
        done: is told the name of each stage when it ends.

    Raises:
        ConversionError: ``invalid_argument``; and, with ``raises``, everything that is refused.
    """
    verified = call is not None if asked.verify is None else asked.verify
    discovery = discover(model, call, calls_are_counted=verified and not asked.keeps)
    if kept_before is not None:
        for finding in discovery.of(CONVERTIBLE):
            if (why := kept_before(finding)) is not None:
                finding.refuse(why)
    decision = Decision(discovery)

    @contextlib.contextmanager
    def refusals() -> Iterator[None]:
        try:
            yield
        except ConversionError as error:
            if raises or error.reason == "invalid_argument":
                raise
            decision.refusals.append(error.diagnostic)

    if asked.device is not None:
        with refusals():
            usable_device(asked.device)
    with refusals():
        declare_id_ranges(discovery, asked.id_ranges)
    with refusals():
        refuse_unsupported(discovery, asked.on_unsupported)
    if asked.shards:
        with refusals():
            refuse_sharded(discovery)
    done("discover")
    if discovery.of(CONVERTED) and not discovery.of(CONVERTIBLE):
        with refusals():
            refuse_other_request(discovery, asked.hashing, asked.backend, asked.passes)
            if asked.shards:
                _refuse_to_copy(model, asked)
        return decision
    with refusals():
        decision.replacements = replace_collections(
            discovery.of(CONVERTIBLE),
            asked.hashing,
            asked.backend,
            resizing,
            keep_refused=asked.keeps or not raises,
            passes=asked.passes,
        )
        if not asked.keeps and not isinstance(asked.hashing, Mapping):
            refuse_raw_ids_of_kept(discovery, decision.replacements)
        if not decision.refusals:
            refuse_unsupported(discovery, asked.on_unsupported)  # of whose tables it turned out now
    if decision.refusals:
        return decision
    with refusals():
        _convert(decision, model, call, asked, verified, done)
    return decision


def _convert(
    decision: Decision,
    model: nn.Module,
    call: Sample | None,
    asked: Request,
    verified: bool,
    done: Callable[[str], None],
) -> None:
    """Put the replacements into a copy of the modules, and compare that with the original."""
    _refuse_to_copy(model, asked)
    decision.converted, _ = copy_modules(model, decision.replacements)
    done("replace, and run the passes")
    conversion = decision.conversion = recorded(decision.discovery, asked.on_unsupported, before=conversion_of(model))
    conversion.notes += compile_dropped(model, asked.inplace) + read_but_not_called(decision.discovery)
    attach_conversion(decision.converted, conversion)
    if verified:
        conversion.notes += check_conversion(
            model, decision.converted, call, conversion, decision.discovery, asked=bool(asked.verify)
        )
        done("verify")


def _refuse_to_copy(model: nn.Module, asked: Request) -> None:
    if not asked.inplace:
        refuse_fully_sharded(model, "call recfx.convert first and fully_shard afterwards; or pass inplace=True.")


def named_passes(given: Any) -> tuple[Pass, ...] | None:
    """The passes that a user names, in order; None if there are none named.

    Raises:
        ConversionError: ``invalid_argument``.
    """
    if given is None:
        return None
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    wrong = [each for each in found if not (isinstance(getattr(each, "name", None), str) and _has_call(each))]
    if wrong or not isinstance(given, Iterable):
        raise ConversionError(
            f"{'passes has' if isinstance(given, Iterable) else 'passes is'} {type_of((wrong or found)[0])}.",
            reason="invalid_argument",
            what_to_do="pass [*recfx.passes(), mine], where mine has a name and a method call(graph) that returns a "
            "recfx.passes.PassResult; for a function: recfx.passes.Rewrite(name, function).",
        )
    return found


def _has_call(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "call", None))


def check_request(model: Any, call: Sample | None, asked: Request) -> None:
    """Refuse what is no model or no request.

    Raises:
        ConversionError: ``invalid_argument``, ``sample_required``.
    """
    check_module(model)
    if asked.on_unsupported not in ("error", "keep"):
        raise ConversionError(
            f"on_unsupported is {asked.on_unsupported!r}.",
            reason="invalid_argument",
            what_to_do="use 'error' or 'keep'.",
        )
    if call is None and asked.verify:
        raise sample_required("verify")


def sample_required(argument: str) -> ConversionError:
    """The error for an argument that needs a sample."""
    return ConversionError(
        f"{argument}=True needs a sample.",
        reason="sample_required",
        what_to_do="pass sample=(inputs, ...), one call of the model.",
    )


def holds_ddp(model: nn.Module) -> bool:
    """Whether a DistributedDataParallel has already made its gradient buckets."""
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())
