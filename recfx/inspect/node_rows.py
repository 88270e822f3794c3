"""The nodes of a report's collections: once for all collections that have the same ones."""

from __future__ import annotations

from collections.abc import Hashable

from recfx.inspect import wording
from recfx.inspect.collection_rows import Grid
from recfx.inspect.report_data import CollectionReport
from recfx.inspect.wording import groups_of, plural

_COLUMNS = ("node", "shape", "bytes", "kernel", "made by")
_MOST_NODES = 24
_MOST_GRAPHS = 3

LEGEND = "B: batch size; W: ranks; L_f: mean number of ids of feature f per sample"


def node_grids(collections: tuple[CollectionReport, ...], every: bool = False) -> tuple[list[Grid], str]:
    """The nodes of each kind of graph, and a line about those that are left out.

    Args:
        collections: those of the report.
        every: the nodes of each collection, however many there are.
    """
    described = [one for one in collections if one.nodes]
    groups = [[one] for one in described] if every else groups_of(described, _kind)
    shown = groups if every else groups[:_MOST_GRAPHS]
    rest = sum(len(group) for group in groups[len(shown) :])
    more = f'... and {plural(rest, "more collection")} with other nodes (tables="all" lists each)' if rest else ""
    return [_grid(group, every) for group in shown], more


def _grid(group: list[CollectionReport], every: bool) -> Grid:
    one = group[0]
    nodes = one.nodes if every else one.nodes[:_MOST_NODES]
    alike = f" ({plural(len(group) - 1, 'more collection')} with the same nodes)" if len(group) > 1 else ""
    rows = tuple(
        (node.name, wording.shape(node.shape), wording.expression(node.bytes), node.kernel, node.made_by)
        for node in nodes
    )
    more = f"... and {len(one.nodes) - len(nodes):,} more nodes" if len(nodes) < len(one.nodes) else ""
    return Grid(f"Nodes of {wording.name_of(one.path)}{alike}", _COLUMNS, rows, more=more).without_empty_columns()


def _kind(one: CollectionReport) -> Hashable:
    return tuple((node.kind, node.made_by, node.kernel) for node in one.nodes)
