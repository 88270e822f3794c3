"""A vector core that is told what to do: counts what it is told, and says when it would be done, by a model.

Scalars are computed one after the other, and hand instructions to three pipes: copies in (MTE2), copies out (MTE3) and
vectors (V). Each pipe begins its instructions in order, and waits where it is told to wait for another. What takes how
long are the assumptions of ``tests.tools.ascend.chip_model``; nothing was timed on a chip.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from tests.ascend.hivm import BYTES
from tests.tools.ascend.chip_model import Assumptions
from tests.tools.ascend.hivm_program import UnknownOperation, Vector

_CACHED_LINES = 256
_LINE_BYTES = 64
_PIECE_BYTES = 256


class _Pipe:
    def __init__(self) -> None:
        self.free = 0.0  # when the next instruction can begin
        self.done = 0.0  # when all have ended

    def begin(self, at: float, occupied: float, ends_after: float) -> None:
        start = max(at, self.free)
        self.free = start + occupied
        self.done = max(self.done, start + ends_after)


class ModelledCore:
    """See ``tests.tools.ascend.hivm_program.Core``.

    Args:
        values: the integers that parameters hold, by name; the contents of others do not matter.
        assumed: what takes how long.
    """

    def __init__(self, values: Mapping[str, Sequence[int]], assumed: Assumptions) -> None:
        self.values, self.assumed = values, assumed
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self._pipes = {name: _Pipe() for name in ("MTE2", "MTE3", "V")}
        self._flags: dict[tuple[str, str, int], deque[float]] = {}
        self._held: dict[int, Any] = {}
        self._lines: OrderedDict[tuple[str, int], None] = OrderedDict()

    @property
    def seconds(self) -> float:
        return max(self.now, *(pipe.done for pipe in self._pipes.values()))

    def scalars(self, operations: int, divisions: int) -> None:
        self.counts["operations"] += operations
        self.counts["divisions"] += divisions
        self.now += operations * self.assumed.operation + divisions * self.assumed.division

    def scalar_load(self, place: Vector) -> Any:
        self.now += self.assumed.load
        if not place.memory:
            return self._held_at(place)
        line = place.memory, place.offset * BYTES[place.dtype] // _LINE_BYTES
        is_new = line not in self._lines
        self._lines[line] = None
        self._lines.move_to_end(line)
        if len(self._lines) > _CACHED_LINES:
            self._lines.popitem(last=False)
        self.counts["loads"] += 1
        self.counts["lines"] += is_new
        self.now += self.assumed.line if is_new else 0.0
        known = self.values.get(place.memory)
        return (0 if place.dtype.startswith("i") else 0.0) if known is None else known[place.offset]

    def _held_at(self, place: Vector) -> Any:
        if place.offset not in self._held and place.dtype.startswith("i"):
            raise UnknownOperation(f"an integer at byte {place.offset} of the unified buffer, which nothing put there")
        return self._held.get(place.offset, 0.0)

    def scalar_store(self, value: Any, place: Vector) -> None:
        self.now += self.assumed.load
        self._held[place.offset] = value

    def copy_in(self, source: Vector, target: Vector) -> None:
        self.counts["copies"] += 1
        self.counts["bytes"] += source.size_bytes
        self._copy("MTE2", source)
        known = self.values.get(source.memory)
        for number in range(0 if known is None else source.elements):
            self._held[target.offset + number * BYTES[target.dtype]] = known[source.offset + number]

    def copy_out(self, source: Vector, target: Vector) -> None:
        self.counts["stores"] += 1
        self.counts["bytes"] += target.size_bytes
        self._copy("MTE3", target)

    def _copy(self, pipe: str, moved: Vector) -> None:
        moving = moved.size_bytes / self.assumed.core_bandwidth
        self.now += self.assumed.operation
        self._pipes[pipe].begin(self.now, max(self.assumed.copy_issue, moving), self.assumed.copy + moving)

    def vector(self, *operands: Any) -> None:
        vectors = [operand for operand in operands if isinstance(operand, Vector) and operand.elements]
        result = vectors[-1]
        for number in range(result.elements if result.dtype.startswith("i") else 0):  # its numbers are not known
            self._held.pop(result.offset + number * BYTES[result.dtype], None)
        busy = max(-(-operand.size_bytes // _PIECE_BYTES) for operand in vectors) * self.assumed.piece
        self.counts["vectors"] += 1
        self.now += self.assumed.operation
        self._pipes["V"].begin(self.now, busy, busy + self.assumed.vector)

    def set_flag(self, source: str, target: str, event: int) -> None:
        self.now += self.assumed.operation
        at = self.now if source == "S" else max(self.now, self._pipes[source].done)
        self._flags.setdefault((source, target, event), deque()).append(at)

    def wait_flag(self, source: str, target: str, event: int) -> None:
        self.now += self.assumed.operation
        at = self._flags[source, target, event].popleft() + self.assumed.wait
        self.counts["waits"] += 1
        self.counts["stops"] += target == "S"
        if target == "S":
            self.now = max(self.now, at)
        else:
            self._pipes[target].free = max(self._pipes[target].free, at)

    def barrier(self, pipe: str) -> None:
        self.counts["waits"] += 1
        self.counts["stops"] += pipe == "ALL"
        if pipe == "ALL":
            self.now = self.seconds
        else:
            self._pipes[pipe].free = max(self._pipes[pipe].free, self._pipes[pipe].done)
