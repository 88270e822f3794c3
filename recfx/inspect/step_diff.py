"""What changed between two steps of the passes, as text."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from torch import fx, nn

from recfx.argument_types import typed
from recfx.collections.converted_collection import converted_collections
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap
from recfx.errors import ConversionError
from recfx.inspect import wording
from recfx.ir.names import node_name
from recfx.ir.snapshot import BEFORE, PASSES_KEY, PassRecord


@typed(ConversionError)
def diff_steps(model_or_graph: nn.Module, first: str, second: str, *, context: int = 3) -> str:
    """The lines by which the graphs of a model's collections differ between two steps, as a unified diff.

    Example:
        >>> from recfx.inspect import diff_steps
        >>> print(diff_steps(recfx.convert(Model()), "before", "lower"))
        --- ...

    Args:
        model_or_graph: a converted model, also inside wrappers; or a graph of ``recfx.trace``, or of one collection.
        first: the name of a pass, whose result is meant, or ``"before"``.
        second: the name of a pass, or ``"before"``; it may also come before ``first``.
        context: how many equal lines to show around each change, 0 or more.

    Returns:
        one section per collection that differs; ``""`` if none does. A collection that has no pass of that name is
        taken as the last of its passes before it left it.

    Raises:
        ConversionError: ``invalid_argument``: it is not a module, or ``context`` is no number of lines;
            ``no_collection``: nothing in it is converted; ``unknown_step``.
    """
    if type(context) is not int or context < 0:
        raise ConversionError(
            f"context={context!r} is not a number of lines.",
            reason="invalid_argument",
            what_to_do="pass a whole number, 0 or more.",
        )
    collections = pass_records(model_or_graph)
    if not collections:
        raise ConversionError(
            "no collection of the model is converted, so no pass has run.",
            reason="no_collection",
            what_to_do="convert the model first.",
        )
    steps = _names(collections)
    for step in (first, second):
        if step not in steps:
            raise ConversionError(
                f"there is no step {step!r}.", reason="unknown_step", what_to_do=f"use one of {', '.join(steps)}."
            )
    parts: list[str] = []
    for path, records in collections.items():
        old, new = (_text(path, records, steps[: steps.index(step) + 1]).splitlines() for step in (first, second))
        before, after = (f"{wording.name_of(path)} {'after ' * (step != BEFORE)}{step}" for step in (first, second))
        parts += difflib.unified_diff(old, new, before, after, n=context, lineterm="")
    return "".join(f"{line}\n" for line in parts)


def _names(collections: Mapping[str, Sequence[PassRecord]]) -> tuple[str, ...]:
    return (BEFORE, *dict.fromkeys(record.name for records in collections.values() for record in records))


def pass_records(model_or_graph: nn.Module) -> dict[str, Sequence[PassRecord]]:
    """The records of the passes of each collection, by fully qualified name."""
    model = unwrap(model_or_graph)
    if isinstance(model, fx.GraphModule) and (own := model.meta.get(PASSES_KEY)):
        return {_named("", own): own}
    if isinstance(model, WholeGraph):
        model = model.python_model
    return {path: collection.pass_records for path, collection in converted_collections(model).items()}


def text_before(path: str) -> str:
    """The text of a collection's graph before the first pass, as ``format_graph`` prints it.

    Args:
        path: fully qualified name of the collection.
    """
    name = node_name(path, "collection")
    return f"features = input\n{name} = collection(features)\nreturn {name}"


def _text(path: str, records: Sequence[PassRecord], done: Sequence[str]) -> str:
    record = next((record for record in reversed(records) if record.name in done), None)
    if record is None:
        return text_before(_named(path, records))
    return record.text


def _named(path: str, records: Sequence[PassRecord]) -> str:
    """The name that the collection had when it was converted, as its nodes have it: its model may be another by now."""
    metas = [node.meta for record in records[-1:] for node in record.nodes if node.meta is not None]
    return metas[0].collection if metas else path
