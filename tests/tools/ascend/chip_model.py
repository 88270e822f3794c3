"""A model of how long the kernels with rows of tables take on an Ascend chip. Nothing here was timed on a chip.

Two things go in. What a kernel does per row was counted in what Ascend's compilers make of it (``row_work.txt``; see
:class:`RowWork`). What each of that takes is assumed (:class:`Assumptions`): there are three sets, and the distance
between them is what is not known. Each vector core takes its share of the work; its units work side by side, and the
one that takes longest binds::

    copies    = max(copies * copy_issue, bytes / core_bandwidth)
    scalars   = operations * operation + divisions * division + loads * load + lines * line
    vectors   = vectors * pieces of a block * piece, of 256 bytes each
    latency   = series * copy + queued * copy_issue + chained * (vector + pieces of a block * piece) + waited * wait
    stopped   = scalars + latency of at most as many series as the scalar unit stops times, where it stops
    core      = max(copies, scalars, vectors, latency, stopped)
    memory    = bytes of all cores / memory_bandwidth
    seconds   = launch + max(core, memory)

``series`` is how many copies' latencies follow one another: with eight rows in flight, an eighth per row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from recfx.kernels.build.tiling import Chip, block_of
from tests.tools.ascend.per_row import Form, FormWork, RowWork

_PIECE_BYTES = 256
"""What a vector core works on at once."""
_NANO = 1e-9


@dataclass(frozen=True)
class Assumptions:
    """What takes how long, in seconds, or in bytes per second. ``SOURCES`` says where each figure comes from.

    Args:
        name: of the set.
        copy: from the beginning of a copy between memory and the unified buffer to its end, beside its bytes.
        copy_issue: from the beginning of one copy to that of the next.
        wait: until one unit knows that another is done.
        load: of a scalar that is cached.
        line: of the first scalar of a line of 64 bytes, beyond ``load``.
        operation: of a scalar, or to hand an instruction to another unit.
        division: of scalars, beyond ``operation``.
        vector: from the beginning of a vector operation to its end, beside its pieces.
        piece: per 256 bytes of a vector.
        core_bandwidth: of one vector core.
        memory_bandwidth: of the chip.
        launch: of a kernel.
    """

    name: str
    copy: float
    copy_issue: float
    wait: float
    load: float
    line: float
    operation: float
    division: float
    vector: float
    piece: float
    core_bandwidth: float
    memory_bandwidth: float
    launch: float


_CYCLE = "assumed: one cycle at 1.8 GHz, two if harsh"
SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "copy": "assumed: vendors' guides find the best bandwidth from 16 kB per copy on, 0.4 us of a core's share",
        "copy_issue": "assumed: about 20, 45 and 110 cycles",
        "wait": "assumed: about 10, 30 and 70 cycles",
        "load": "assumed: about 5, 15 and 35 cycles",
        "line": "assumed: fetched ahead, from the chip's second-level cache, from memory",
        "operation": _CYCLE,
        "division": "assumed: about 10, 20 and 55 cycles",
        "vector": "assumed: about 10, 30 and 55 cycles",
        "piece": _CYCLE,
        "core_bandwidth": "assumed: two, one and a quarter, and one of a core's share of the memory's",
        "memory_bandwidth": "data sheet of the Atlas 800T A2, peak",
        "launch": "assumed",
    }
)
MEMORY_BANDWIDTH = 1600e9
"""Bytes per second of the memory of an Ascend910B3."""

KIND = Assumptions(
    "kind", 500 * _NANO, 10 * _NANO, 5 * _NANO, 3 * _NANO, 50 * _NANO, 0.55 * _NANO, 5 * _NANO, 5 * _NANO, 0.55 * _NANO,
    80e9, MEMORY_BANDWIDTH, 5e-6,
)  # fmt: skip
MIDDLE = Assumptions(
    "middle", 800 * _NANO, 25 * _NANO, 15 * _NANO, 8 * _NANO, 200 * _NANO, 0.55 * _NANO, 10 * _NANO, 15 * _NANO,
    0.55 * _NANO, 50e9, MEMORY_BANDWIDTH, 10e-6,
)  # fmt: skip
HARSH = Assumptions(
    "harsh", 1500 * _NANO, 60 * _NANO, 40 * _NANO, 20 * _NANO, 800 * _NANO, 1.1 * _NANO, 30 * _NANO, 30 * _NANO,
    1.1 * _NANO, 40e9, MEMORY_BANDWIDTH, 20e-6,
)  # fmt: skip
ASSUMPTIONS = (KIND, MIDDLE, HARSH)


@dataclass(frozen=True)
class Modelled:
    """The answer of the model.

    Args:
        seconds: of one launch.
        share: of the memory's bandwidth, 1 at most.
        binds: what takes longest: ``copies``, ``scalars``, ``vectors``, ``latency`` or ``memory``.
    """

    seconds: float
    share: float
    binds: str


def modelled_form(
    form: Form, work: FormWork, positions: float, more: float, dim: int, chip: Chip, assumed: Assumptions
) -> Modelled:
    """How long a launch of one form takes, compiled with one version of the compiler.

    Args:
        form: of the kernel.
        work: what it does per row.
        positions: ids that are looked up, or whose gradients are added.
        more: bags, or for ``recfx_fused_step`` the rows that are stepped.
        dim: columns of the tables' rows.
        chip: where the kernel would run.
        assumed: what takes how long.
    """
    total = RowWork().plus(work.row, positions).plus(work.more, more)
    moved = total.bytes * dim / form.block
    of_core = RowWork().plus(total, 1 / chip.vector_cores)
    parts = parts_of(of_core, moved / chip.vector_cores, block_of(dim), assumed)
    parts["memory"] = moved / assumed.memory_bandwidth
    binds = max(parts, key=lambda name: parts[name])
    seconds = assumed.launch + parts[binds]
    return Modelled(seconds, parts["memory"] / seconds, binds)


def parts_of(work: RowWork, moved: float, block: int, assumed: Assumptions) -> dict[str, float]:
    """How long each unit of a core is busy, and how long it takes until all copies have come, in seconds.

    Args:
        work: of the core.
        moved: its bytes.
        block: columns.
        assumed: what takes how long.
    """
    pieces = -(-4 * block // _PIECE_BYTES)
    told = work.copies + work.stores + work.vectors + work.waits
    scalars = (
        (work.operations + told) * assumed.operation
        + work.divisions * assumed.division
        + work.loads * assumed.load
        + work.lines * assumed.line
    )
    moving = moved / max(work.copies + work.stores, 1) / assumed.core_bandwidth
    copying = assumed.copy + moving
    others = (
        work.queued * max(assumed.copy_issue, moving)
        + work.chained * (assumed.vector + pieces * assumed.piece)
        + work.waited * assumed.wait
    )
    latency = work.series * copying + others
    if work.stops:
        latency = max(latency, scalars + min(work.series, work.stops) * copying + others)
    return {
        "copies": max(max(work.copies, work.stores) * assumed.copy_issue, moved / assumed.core_bandwidth),
        "scalars": scalars,
        "vectors": work.vectors * pieces * assumed.piece,
        "latency": latency,
    }
