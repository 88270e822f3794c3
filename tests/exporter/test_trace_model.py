"""What the next trace of a model does differently, after one has failed."""

from recfx.errors import Diagnostic
from recfx.exporter.trace_model import WayFailed, Ways


def failed(stage: str, path: str = "", *entered: str) -> WayFailed:
    return WayFailed(Diagnostic("not_scriptable", path, ""), stage, frozenset(entered))


def test_one_way_after_the_other_is_learned_until_nothing_is_left() -> None:
    ways = Ways()
    ways.learn(failed("leaf", "a"))
    ways.learn(failed("leaf", "b"))
    assert ways == Ways(inside=frozenset({"a", "b"})), "all leaves that cannot be compiled are entered together"
    ways.learn(failed("differs", "", "b", "c"))
    ways.learn(failed("differs", "", "d"))
    assert ways == Ways(opaque=frozenset({"b", "c", "d"}), inside=frozenset({"a", "b"}))
    ways.learn(failed("differs", "", "b"))  # left alone already: it was not because of them
    assert ways == Ways(deep=True)
    ways.learn(failed("leaf", "a"))
    ways.learn(failed("leaf", "a"))
    assert ways == Ways(inside=frozenset({"a"}), deep=True, exhausted=True)
