"""The walk of one ``convert`` call goes down the list of packages; who calls back up is listed, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import pytest

import recfx
from tests.builders.batches import batch
from tests.models.handwritten import Tower
from tests.structure import LAYERS, layer

# Calls of a package by a file below it, each of a function that was handed down, and why.
CALLBACKS: dict[tuple[str, str], str] = {
    ("recfx.ir.printer", "runtime"): "the printer shows what the module of a node says of itself",
    ("recfx.ir.snapshot", "passes"): "what a graph says is read by what runs the passes",
    ("recfx.ir.operator_graph", "lowering"): "passes ask the kernel targets through the context of their graph",
    ("recfx.ir.context", "lowering"): "graphs are made for equal tables if their kernel targets are equal as well",
    ("recfx.passes.lower", "lowering"): "so do they for operators that find ids",
    ("recfx.passes.base", "collections"): "what runs the passes of a user tells which of them raised",
    ("recfx.runtime.base", "collections"): "every leaf of a trace is called through its base class",
    ("recfx.runtime.base", "discovery"): "the tracer that the user's forward runs under notes the call",
    ("recfx.runtime.base", "verification"): "hooks count the calls of collections, and note what they pool",
    ("recfx.conversion.convert", "inspect"): "what its report warns of is given as Python warnings",
    ("recfx.printing.shown", "verification"): "a report of what was compared is in that of the model",
    ("recfx.lowering.cpu", "runtime"): "a batch that one kernel hashes and looks up is made by the node that hashes",
}


BATCH = batch(4)


class Walk:
    """Who calls whom, by package, while ``function`` runs.

    Args:
        function: what is run; all imports have been done.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self.entered: list[str] = []
        self.calls: set[tuple[str, str, str]] = set()  # file, package and function that it calls
        sys.setprofile(self._note)
        try:
            function()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        callee = _package(frame)
        if event != "call" or callee is None:
            return
        if callee not in self.entered:
            self.entered.append(callee)
        above = frame.f_back
        while above is not None and _package(above) is None:  # torch's frames, and the user's
            above = above.f_back
        caller = None if above is None else _package(above)
        if caller is not None and above is not None and caller != callee:
            self.calls.add((above.f_globals["__name__"], callee, _where(frame)))


def _package(frame: FrameType) -> str | None:
    name = frame.f_globals.get("__name__", "")
    if not name.startswith("recfx.") or name == "recfx.argument_types":  # which calls what it wraps
        return None
    return layer(name)


def _where(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"


CASES: dict[str, dict[str, Any]] = {
    "without a sample": {},
    "with a sample": {"sample": (BATCH,)},
    "raw ids": {"sample": (BATCH,), "hashing": recfx.HashConfig(dense_rows=0)},
    "whole graph": {"sample": (BATCH,), "whole_graph": True},
    "in place": {"sample": (BATCH,), "inplace": True},
}


@pytest.mark.parametrize("case", CASES)
def test_no_package_is_entered_from_below(case: str) -> None:
    recfx.convert(Tower(), **CASES[case])  # what is imported or made once
    walk = Walk(lambda: recfx.convert(Tower(), **CASES[case]))
    assert walk.entered[0] == "conversion"
    assert {"discovery", "replacement", "collections", "passes", "runtime", "ir"} <= set(walk.entered)
    up = [
        f"{caller} calls {called}"
        for caller, callee, called in walk.calls
        if LAYERS.index(layer(caller)) > LAYERS.index(callee) and (caller, callee) not in CALLBACKS
    ]
    assert not up, "\n".join(up)


def test_a_call_from_below_is_noticed() -> None:
    above = FunctionType((lambda: None).__code__, {"__name__": "recfx.conversion.convert"})
    below = FunctionType(compile("call()", "below", "exec"), {"__name__": "recfx.hashing.config", "call": above})
    assert Walk(below).calls == {("recfx.hashing.config", "conversion", "recfx.conversion.convert.<lambda>")}
