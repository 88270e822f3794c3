"""A step's cost: in expressions (``Cost``), in numbers (``CostAt``), and several of these side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from recfx.errors import ConversionError, InputError
from recfx.planner.pricing.cost_text import expression, in_time, plain, step_text
from recfx.planner.pricing.graph_prices import DENSE
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_facts import NOTHING_KNOWN, KnownBatch, Values, shares_of
from recfx.planner.pricing.planned_collection import PlannedCollection
from recfx.planner.pricing.step_price import NodePrice, StepPrice, Totals, price, price_step
from recfx.planner.pricing.work import NodeCost, Resident
from recfx.printing.grid import Grid, size
from recfx.printing.shown import Shown

COST_VERSION = "2"
COMPARISON_VERSION = "1"


@dataclass(frozen=True, repr=False)
class CostAt(Shown):
    """The cost of a step in numbers. ``str()`` is a table for a terminal; notebooks show one as well.

    Args:
        version: the version of this schema.
        batch: samples per rank.
        world_size: the number of ranks.
        rank: the rank whose nodes these are.
        lengths: the mean number of ids per sample, by feature.
        hardware: what the times are predicted for.
        nodes: every node, in order.
        step: all ranks, if the model is sharded.
        trains: whether the step has a backward.
        notes: what the numbers assume, and what is not in them, in sentences.
    """

    version: str
    batch: int
    world_size: int
    rank: int
    lengths: Mapping[str, float]
    hardware: Hardware
    nodes: tuple[NodePrice, ...]
    step: StepPrice | None = None
    trains: bool = True
    notes: tuple[str, ...] = ()

    @cached_property
    def totals(self) -> Totals:
        """The sums over all nodes of this rank."""
        return Totals.of(self.nodes)

    @property
    def seconds(self) -> float:
        """The predicted time of a step; if there are several ranks, with their waiting for each other."""
        return self.totals.seconds if self.step is None else self.step.seconds

    @property
    def ranks(self) -> tuple[Totals, ...]:
        """The totals of every rank."""
        return (self.totals,) if self.step is None else self.step.ranks

    @property
    def imbalance(self) -> float:
        """The time of the slowest rank over the mean of all ranks, 1 if all are equal."""
        return 1.0 if self.step is None else self.step.imbalance

    @property
    def step_text(self) -> str:
        """The predicted time, and the step that it is predicted for."""
        return f"{in_time(self.seconds)} predicted for a {self._step_in_words}"

    @property
    def _step_in_words(self) -> str:
        return step_text(self.trains, self.hardware.name, self.batch, self.lengths, self.world_size)

    def as_grid(self) -> Grid:
        rows = [(node.name, node.kind, *_numbers(node)) for node in self.nodes]
        rows.append(("total" if self.step is None else "total of this rank", "", *_numbers(self.totals)))
        parts = {} if self.step is None else {name: seconds for name, seconds in self.step.parts.items() if seconds}
        sums = " + ".join(f"{name} {in_time(seconds)}" for name, seconds in parts.items())
        ranks = f"a step of all {self.world_size} ranks, which wait for each other: {in_time(self.seconds)} = {sums}"
        return Grid(
            title=f"{_rank(self.rank, self.world_size)}{self._step_in_words}",
            columns=("node", "kind", *_AMOUNTS),
            rows=tuple(rows),
            numbers=frozenset(_AMOUNTS),
            more="" if self.step is None else ranks,
            above=(f"{_times(self)}; wire is what the rank passes to collectives", *self.notes),
        )

    def __repr__(self) -> str:
        return f"CostAt(W={self.world_size}, {len(self.nodes):,} nodes, {self.step_text})"

    def to_json(self) -> str:
        """Everything, with the totals; keys are in the order of the fields."""
        return json.dumps(plain(self) | {"totals": plain(self.totals)}, indent=2)


@dataclass(frozen=True, repr=False)
class Cost:
    """What each node of a model costs per step on one rank, in ``B``, ``W`` and ``L_<feature>``; ``str()`` lists
    them.

    Args:
        version: the version of this schema; it changes when a field changes its meaning or is removed.
        nodes: every node, in order.
        features: the features of all collections.
        world_size: the number of ranks.
        rank: the rank whose nodes these are.
        trains: whether a step has a backward.
        device: the type of the device that has the tables.
        hardware: what times are predicted for.
        planned: the sharded collections, on all ranks.
        again: gives the cost of the same model on another number of ranks, if it is not sharded already.
        known: the batch that numbers start from.
    """

    version: str
    nodes: tuple[NodeCost, ...]
    features: tuple[str, ...]
    world_size: int
    rank: int
    trains: bool
    device: str
    hardware: Hardware
    planned: tuple[PlannedCollection, ...] = ()
    again: Callable[[int], Cost] | None = None
    known: KnownBatch = NOTHING_KNOWN

    @property
    def read_bytes(self) -> sympy.Expr:
        """Bytes read from memory per step."""
        return sympy.Add(*(node.read_bytes for node in self.nodes))

    @property
    def written_bytes(self) -> sympy.Expr:
        """Bytes written to memory per step."""
        return sympy.Add(*(node.written_bytes for node in self.nodes))

    @property
    def flops(self) -> sympy.Expr:
        """Floating-point operations per step."""
        return sympy.Add(*(node.flops for node in self.nodes))

    @property
    def wire_bytes(self) -> sympy.Expr:
        """Bytes that this rank passes to collectives per step, its own part included."""
        return sympy.Add(*(node.wire_bytes for node in self.nodes))

    @property
    def resident(self) -> Resident:
        """Bytes that stay in this rank's memory between steps."""
        return sum((node.resident for node in self.nodes), Resident())

    @property
    def resident_bytes(self) -> int:
        return self.resident.total

    def node(self, name: str) -> NodeCost:
        """The node of this name.

        Raises:
            KeyError: there is none.
        """
        return {node.name: node for node in self.nodes}[name]

    def at(self, B: int | None = None, W: int | None = None, L: Any = None) -> CostAt:
        """The cost in numbers.

        Args:
            B: samples per rank. Default: those of the sample that the cost was told, or else 512.
            W: the number of ranks. Default: those that the cost is for. For any other number, a model that is not
                sharded yet is planned anew, as ``recfx.plan`` does.
            L: the mean number of ids per sample: a number for all features, or a mapping with numbers for some of them,
                where ``""`` stands for all others. The lengths of features that it does not name are those of the
                sample that the cost was told, or else 1; if it names all, it may name others as well. Where different
                ids are sent once, ``"<feature>.different"`` is their mean number; by default it follows from the
                expected share that ``convert`` was told, or else it is that of all ids.

        Raises:
            InputError: ``invalid_argument``, ``unknown_feature``.
            ConversionError: ``already_sharded``, and those of ``recfx.plan``.
        """
        if W is not None and Values(1, W, 0, ()).world != self.world_size:
            return self._on(W).at(B, L=L)
        shares = shares_of(table for collection in self.planned for table in collection.tables)
        batch = self.known.batch if B is None else B
        values = Values(batch, self.world_size, L, self.features, shares, self.known)
        nodes = tuple(price(node, values, self.hardware) for node in self.nodes)
        return CostAt(
            version=self.version,
            batch=values.batch,
            world_size=values.world,
            rank=self.rank,
            lengths={name: float(length) for name, length in values.lengths.items()},
            hardware=self.hardware,
            nodes=nodes,
            step=self._step(nodes, values) if self.planned else None,
            trains=self.trains,
            notes=tuple(filter(None, [self.copies_left_out(self.hardware), _NOT_IN_IT])),
        )

    def _step(self, nodes: Sequence[NodePrice], values: Values) -> StepPrice:
        sharded = {collection.name for collection in self.planned}
        rest = Totals.of(node for node in nodes if node.kind == DENSE or node.collection not in sharded)
        return price_step(self.planned, self.trains, values, self.hardware, rest)

    def copies_left_out(self, hardware: Hardware) -> str:
        """That the graph is one of a host, without the copies that ``hardware`` needs; ``""`` if it is not."""
        kinds = {node.kind for node in self.nodes}
        is_like_it = hardware.device in ("", "cpu", self.device)
        if is_like_it or "to_host" in kinds or not kinds & {"hash_ids", "hash_lookup"}:
            return ""
        return (
            f"priced as the graph of this host: on {hardware.name}, ids are also copied to the host, hashed there and "
            "copied back; plan for several ranks, with a topology or --ranks, to see these nodes"
        )

    def sweep(self, W: Iterable[int], *, B: int | None = None, L: Any = None) -> PlanComparison:
        """The cost on several numbers of ranks, each with the cheapest plan; the other arguments and errors are those
        of :meth:`at`.
        """
        if not isinstance(W, Iterable) or not (W := list(W)):
            raise InputError(
                f"W is {W!r}.",
                reason="invalid_argument",
                what_to_do="pass the numbers of ranks as a list, such as [8, 64, 1024].",
            )
        return PlanComparison(tuple(PlanRow(f"W={ranks}", {}, self.at(B, ranks, L)) for ranks in W))

    def _on(self, world_size: int) -> Cost:
        if self.again is None:
            raise ConversionError(
                f"this is the cost on {self.world_size} ranks of a model that is already sharded, of a graph, or of "
                f"hardware without links between hosts; it says nothing about {world_size} ranks.",
                reason="already_sharded",
                what_to_do="pass the model before it is sharded, with a topology.",
            )
        return self.again(world_size)

    def __str__(self) -> str:
        lines = [f"{self._title}, as formulas: .at(B=..., L=...) gives numbers and times"]
        for node in self.nodes:
            amounts = {"reads": node.read_bytes, "writes": node.written_bytes, "flops": node.flops}
            lines.append(f"{node.name}  ({node.kind})")
            for name, amount in {**amounts, "wire": node.wire_bytes}.items():
                lines += [f"  {name:<9}{expression(amount)}"] if amount != 0 else []
            lines += [f"  resident {size(node.resident_bytes)}"] if node.resident_bytes else []
        return "\n".join([*lines, f"resident in all: {size(self.resident_bytes)}"])

    def __repr__(self) -> str:
        return f"Cost({self._title}, {len(self.nodes):,} nodes, {size(self.resident_bytes)} resident)"

    @property
    def _title(self) -> str:
        return f"{_rank(self.rank, self.world_size)}{'training' if self.trains else 'eval'} step"

    def to_json(self) -> str:
        """Everything; keys are in the order of the fields, and expressions are text."""
        names = ("version", "rank", "world_size", "trains", "device", "features", "nodes")
        return json.dumps({name: plain(getattr(self, name)) for name in names}, indent=2)


def features_of(nodes: Sequence[NodeCost], planned: Sequence[PlannedCollection] = ()) -> tuple[str, ...]:
    """The features whose lengths the cost depends on, in alphabetical order."""
    symbols: set[sympy.Basic] = set()
    for node in nodes:
        for amount in (node.read_bytes, *(call.bytes for call in node.collectives)):
            symbols |= amount.free_symbols
    features = {str(symbol)[2:] for symbol in symbols if str(symbol).startswith("L_")}
    features |= {name for collection in planned for table in collection.tables for name in table.feature_names}
    features |= {name for collection in planned for table in collection.tables for name in table.sent_lengths}
    return tuple(sorted(features))


@dataclass(frozen=True)
class PlanRow:
    """One plan.

    Args:
        name: as given.
        types: the sharding type of every table, by ``<collection>.<table>``.
        cost: what it costs.
    """

    name: str
    types: Mapping[str, str]
    cost: CostAt


@dataclass(frozen=True, repr=False)
class PlanComparison(Shown):
    """Several plans for one model, in the order given. ``str()`` is a table for a terminal; notebooks show one."""

    rows: tuple[PlanRow, ...]

    @property
    def best(self) -> PlanRow:
        """The plan with the shortest predicted step."""
        return min(self.rows, key=lambda row: row.cost.seconds)

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def as_grid(self) -> Grid:
        best, columns = self.best, ("plan", *_HEADS, "sharding")
        rows = []
        for row in self.rows:
            counts = ", ".join(f"{count} {kind}" for kind, count in Counter(row.types.values()).most_common())
            rows.append((f"{'*' if row is best else ' '} {row.name}", *_cells(row.cost), counts))
        more = "step is ids + tables + output + wire + the rest of the model (dense and dense_all_reduce)"
        above = (f"{_times(best.cost)}; * is the fastest plan", *best.cost.notes)
        return Grid(best.cost._step_in_words, columns, tuple(rows), frozenset(_HEADS), more, above)

    def __repr__(self) -> str:
        return f"PlanComparison({len(self.rows):,} plans, best: {self.best.name}, {self.best.cost.step_text})"

    def to_json(self) -> str:
        """Every plan with its types and totals; keys are in a fixed order."""
        rows = [{"name": row.name, "types": dict(row.types), **_totals(row.cost)} for row in self.rows]
        return json.dumps({"version": COMPARISON_VERSION, "best": self.best.name, "plans": rows}, indent=2)


_AMOUNTS = ("read", "written", "flops", "wire", "resident", "time")
_SHOWN = ("ids", "tables", "output", "wire")
_HEADS = ("ranks", "step", *_SHOWN, "sent by a rank", "fullest rank", "imbalance")


def _times(cost: CostAt) -> str:
    hosts = f", {cost.hardware.ranks_per_host} ranks per host" if cost.world_size > 1 else ""
    return f"times predicted for {cost.hardware.label}{hosts}"


_NOT_IN_IT = (
    "not in it: Python, layers that are not linear, activations, the loss, and optimizers that do not run in backward"
)


def _totals(cost: CostAt) -> dict[str, object]:
    return {
        "world_size": cost.world_size,
        "seconds": cost.seconds,
        "parts": {} if cost.step is None else cost.step.parts,
        "wire_bytes": max(rank.wire_bytes for rank in cost.ranks),
        "resident_bytes": max(rank.resident_bytes for rank in cost.ranks),
        "imbalance": cost.imbalance,
    }


def _cells(cost: CostAt) -> tuple[str, ...]:
    totals: dict[str, Any] = _totals(cost)
    return (
        str(cost.world_size),
        in_time(cost.seconds),
        *(in_time(totals["parts"][name]) if name in totals["parts"] else "" for name in _SHOWN),
        size(totals["wire_bytes"]),
        size(totals["resident_bytes"]),
        f"{cost.imbalance:.2f}",
    )


def _rank(rank: int, world_size: int) -> str:
    return "" if world_size == 1 else f"rank {rank} of {world_size}, "


def _numbers(node: NodePrice | Totals) -> list[str]:
    sizes = [size(node.read_bytes), size(node.written_bytes), f"{node.flops:.3g}"]
    return [*sizes, size(node.wire_bytes), size(node.resident_bytes), in_time(node.seconds)]
