"""A step's cost: in expressions (``Cost``), in numbers (``CostAt``), and several of these side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import sympy

from recfx.errors import ConversionError, InputError
from recfx.errors.grid import Grid, size
from recfx.errors.shown import Shown
from recfx.planner.pricing.graph_prices import DENSE
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_facts import Values, shares_of, whole_number
from recfx.planner.pricing.step_price import PlannedCollection, price, price_step
from recfx.planner.pricing.work import BATCH_SIZE, NodeCost, Totals, counted, expression, in_time, step_text


@dataclass(frozen=True, repr=False)
class CostAt(Shown):
    """The cost of a step in numbers. ``str()`` is a table for a terminal; notebooks show one as well."""

    batch: int  # samples per rank
    world_size: int  # the number of ranks
    rank: int  # the rank whose nodes these are
    lengths: Mapping[str, float]  # the mean number of ids per sample, by feature
    hardware: Hardware  # what the times are predicted for
    nodes: tuple[NodeCost, ...]  # every node, in order
    ranks: tuple[Totals, ...]  # the totals of every rank; their seconds do not count waiting for other ranks
    parts: Mapping[str, float]  # the seconds of each part of a step of all ranks; none if the model is not sharded
    trains: bool = True  # whether the step has a backward
    notes: tuple[str, ...] = ()  # what the numbers assume, and what is not in them, in sentences

    @cached_property
    def totals(self) -> Totals:
        """The sums over all nodes of this rank."""
        return Totals.of(self.nodes)

    @property
    def seconds(self) -> float:
        """The predicted time of a step; if there are several ranks, with their waiting for each other."""
        return sum(self.parts.values()) if self.parts else self.totals.seconds

    @property
    def imbalance(self) -> float:
        """The time of the slowest rank over the mean of all ranks, 1 if all are equal."""
        times = [rank.seconds for rank in self.ranks]
        return max(1.0, max(times) * len(times) / sum(times)) if sum(times) else 1.0  # sums are rounded

    @property
    def step_text(self) -> str:
        """The predicted time, and the step that it is predicted for."""
        return f"{in_time(self.seconds)} predicted for a {self._step_in_words}"

    @property
    def _step_in_words(self) -> str:
        return step_text(self.trains, self.hardware.name, self.batch, self.lengths, self.world_size)

    def as_grid(self) -> Grid:
        rows = [(node.name, node.kind, *_numbers(node)) for node in self.nodes]
        rows.append(("total of this rank" if self.parts else "total", "", *_numbers(self.totals)))
        sums = " + ".join(f"{name} {in_time(seconds)}" for name, seconds in self.parts.items() if seconds)
        ranks = f"a step of all {self.world_size} ranks, which wait for each other: {in_time(self.seconds)} = {sums}"
        return Grid(
            title=f"{_rank(self.rank, self.world_size)}{self._step_in_words}",
            columns=("node", "kind", *_AMOUNTS),
            rows=tuple(rows),
            numbers=frozenset(_AMOUNTS),
            more=ranks if self.parts else "",
            above=(f"{_times(self)}; wire is what the rank passes to collectives", *self.notes),
        )

    def __repr__(self) -> str:
        return f"CostAt(W={self.world_size}, {len(self.nodes):,} nodes, {self.step_text})"


@dataclass(frozen=True, repr=False)
class Cost:
    """What each node costs per step on one rank, in ``B``, ``W`` and ``L_<feature>``; ``str()`` lists them."""

    nodes: tuple[NodeCost, ...]  # every node, in order
    features: tuple[str, ...]  # the features of all collections
    world_size: int  # the number of ranks
    rank: int  # the rank whose nodes these are
    trains: bool  # whether a step has a backward
    device: str  # the type of the device that has the tables
    hardware: Hardware  # what times are predicted for
    planned: tuple[PlannedCollection, ...] = ()  # the sharded collections, on all ranks
    # gives the cost of the same model on another number of ranks, if it is not sharded already
    again: Callable[[int], Cost] | None = None
    batch: int = BATCH_SIZE  # the samples per rank that numbers start from
    lengths: Mapping[str, Fraction] = field(default_factory=dict)  # the lengths of features that they start from

    @cached_property
    def totals(self) -> Totals:
        """The sums over all nodes of this rank."""
        return Totals.of(self.nodes)

    def node(self, name: str) -> NodeCost:
        """The node of this name, or KeyError."""
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
        if W is not None and whole_number(W, "W") != self.world_size:
            if self.again is None:
                raise ConversionError(
                    f"this is the cost on {self.world_size} ranks of a model that is sharded, of a graph, or of "
                    f"hardware without links between hosts; it says nothing about {W} ranks.",
                    reason="already_sharded",
                    what_to_do="pass the model before it is sharded, with a topology.",
                )
            return self.again(W).at(B, L=L)
        shares = shares_of(table for collection in self.planned for table in collection.context.tables)
        batch = self.batch if B is None else B
        values = Values(batch, self.world_size, L, self.features, shares, self.lengths)
        nodes = tuple(price(node, values, self.hardware) for node in self.nodes)
        sharded = {collection.context.name for collection in self.planned}
        rest = Totals.of(node for node in nodes if node.kind == DENSE or node.collection not in sharded)
        priced = price_step(self.planned, self.trains, values, self.hardware, rest) if self.planned else ((rest,), {})
        return CostAt(
            batch=values.batch, world_size=values.world, rank=self.rank,
            lengths={name: float(length) for name, length in values.lengths.items()}, hardware=self.hardware,
            nodes=nodes, ranks=priced[0], parts=priced[1], trains=self.trains,
            notes=tuple(filter(None, [self.copies_left_out, _NOT_IN_IT])),
        )  # fmt: skip

    @property
    def copies_left_out(self) -> str:
        """That the graph is one of a host, without the copies that the hardware needs; ``""`` if it is not."""
        kinds = {node.kind for node in self.nodes}
        is_like_it = self.hardware.device in ("", "cpu", self.device)
        if is_like_it or "to_host" in kinds or not kinds & {"hash_ids", "hash_lookup"}:
            return ""
        return (
            f"priced as the graph of this host: on {self.hardware.name}, ids are also copied to the host, hashed there "
            "and copied back; plan for several ranks, with a topology or --ranks, to see these nodes"
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

    def __str__(self) -> str:
        lines = [f"{self._title}, as formulas: .at(B=..., L=...) gives numbers and times"]
        for node in self.nodes:
            amounts = {"reads": node.read_bytes, "writes": node.written_bytes, "flops": node.flops}
            lines.append(f"{node.name}  ({node.kind})")
            for name, amount in {**amounts, "wire": node.wire_bytes}.items():
                lines += [f"  {name:<9}{expression(amount)}"] if amount != 0 else []
            lines += [f"  resident {size(node.resident_bytes)}"] if node.resident_bytes else []
        return "\n".join([*lines, f"resident in all: {size(self.totals.resident_bytes)}"])

    def __repr__(self) -> str:
        return f"Cost({self._title}, {len(self.nodes):,} nodes, {size(self.totals.resident_bytes)} resident)"

    @property
    def _title(self) -> str:
        return f"{_rank(self.rank, self.world_size)}{'training' if self.trains else 'eval'} step"


def features_of(nodes: Sequence[NodeCost]) -> tuple[str, ...]:
    """The features whose lengths the cost depends on, in alphabetical order."""
    amounts = (amount for node in nodes for amount in (node.read_bytes, node.wire_bytes))
    symbols = {str(symbol) for amount in amounts for symbol in sympy.sympify(amount).free_symbols}
    return tuple(sorted(symbol[2:] for symbol in symbols if symbol.startswith("L_")))


@dataclass(frozen=True)
class PlanRow:
    """One plan."""

    name: str  # as given
    types: Mapping[str, str]  # the sharding type of every table, by ``<collection>.<table>``
    cost: CostAt  # what it costs


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
            rows.append((f"{'*' if row is best else ' '} {row.name}", *_cells(row.cost), counted(row.types.values())))
        more = "step is ids + tables + output + wire + the rest of the model (dense and dense_all_reduce)"
        above = (f"{_times(best.cost)}; * is the fastest plan", *best.cost.notes)
        return Grid(best.cost._step_in_words, columns, tuple(rows), frozenset(_HEADS), more, above)

    def __repr__(self) -> str:
        return f"PlanComparison({len(self.rows):,} plans, best: {self.best.name}, {self.best.cost.step_text})"


_AMOUNTS = ("read", "written", "flops", "wire", "resident", "time")
_SHOWN = ("ids", "tables", "output", "wire")
_HEADS = ("ranks", "step", *_SHOWN, "sent by a rank", "fullest rank", "imbalance")


def _times(cost: CostAt) -> str:
    hosts = f", {cost.hardware.ranks_per_host} ranks per host" if cost.world_size > 1 else ""
    return f"times predicted for {cost.hardware.label}{hosts}"


_NOT_IN_IT = (
    "not in it: Python, layers that are not linear, activations, the loss, and optimizers that do not run in backward"
)


def _cells(cost: CostAt) -> tuple[str, ...]:
    return (
        str(cost.world_size),
        in_time(cost.seconds),
        *(in_time(cost.parts[name]) if name in cost.parts else "" for name in _SHOWN),
        size(max(rank.wire_bytes for rank in cost.ranks)),
        size(max(rank.resident_bytes for rank in cost.ranks)),
        f"{cost.imbalance:.2f}",
    )


def _rank(rank: int, world_size: int) -> str:
    return "" if world_size == 1 else f"rank {rank} of {world_size}, "


def _numbers(node: NodeCost | Totals) -> list[str]:
    sizes = [size(node.read_bytes), size(node.written_bytes), f"{node.flops:.3g}"]
    return [*sizes, size(node.wire_bytes), size(node.resident_bytes), in_time(node.seconds)]
