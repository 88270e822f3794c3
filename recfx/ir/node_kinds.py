"""Node kinds: one meaning and one name in code, graph, report, profiler ranges and tests.

Each is declared once, here. The verifier, the passes, the pipeline's stages and the printer read these declarations. A
new kind is one declaration and one file in ``recfx/runtime``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

NOT_COMBINED = "NONE"
"""The ``combine`` of a lookup whose value is a tuple with ``[n, D]`` for each key, a row for each of its ids. Rows that
have arrived from other ranks are one tensor, key by key. The size of a value is that of all keys together."""


class Measure(Enum):
    """What decides how big a value is."""

    NOTHING = "no tensor of its own"
    IDS = "one number for each id"
    COLUMNS = "one row for each sample, of the columns of all tables"
    ROWS = "one row for each id; all tables have the same number of columns"


class ValueType(Enum):
    """The types of values that travel on edges: the name in messages, and how values of the type are measured."""

    BATCH = "the model's own KJT", Measure.NOTHING
    IDS = "a KJT of selected ids", Measure.IDS
    ROUTED_IDS = "a KJT of ids by destination", Measure.IDS
    IDS_IN_FLIGHT = "ids in flight", Measure.IDS
    CONTEXT_IN_FLIGHT = "a dist context in flight", Measure.NOTHING
    ARRIVED_IDS = "a KJT of ids that have arrived", Measure.IDS
    DIST_CONTEXT = "a dist context", Measure.NOTHING
    HOST_IDS = "a KJT of ids on the host", Measure.IDS
    DIFFERENT_IDS = "a KJT of the different ids of each key", Measure.IDS
    INVERSE = "the numbers of ids among the different ones", Measure.NOTHING
    ROWS = "a KJT of rows", Measure.IDS
    DEVICE_ROWS = "a KJT of rows on the device", Measure.IDS
    BATCH_IN_FLIGHT = "a batch in flight", Measure.NOTHING
    POOLED = "pooled rows of a lookup", Measure.COLUMNS
    UNPOOLED = "a row for each id of a lookup", Measure.ROWS
    POOLED_IN_FLIGHT = "pooled rows in flight", Measure.COLUMNS
    UNPOOLED_IN_FLIGHT = "rows in flight, one for each id", Measure.ROWS
    ARRIVED_POOLED = "pooled rows that have arrived", Measure.COLUMNS
    ARRIVED_UNPOOLED = "rows that have arrived, one for each id", Measure.ROWS
    DIVIDED = "pooled means", Measure.COLUMNS
    EXPANDED = "a row for each id, made of one for each different id", Measure.ROWS
    KEYED_TENSOR = "a KeyedTensor", Measure.COLUMNS
    JAGGED_DICT = "a dict of JaggedTensors", Measure.ROWS

    def __init__(self, text: str, measure: Measure) -> None:
        self.text, self.measure = text, measure


class Stage(Enum):
    """The stages of a step, in order. No value goes back to an earlier stage."""

    SELECT = 0
    INPUT_DIST = 1
    HASH = 2
    LOOKUP = 3
    OUTPUT_DIST = 4
    ASSEMBLE = 5


class Input(NamedTuple):
    """One input of a node."""

    types: tuple[ValueType, ...]  # the types that are accepted
    repeats: bool = False  # there may be any number of such inputs in a row, including none
    optional: bool = False  # it may be missing


COMBINES = ("SUM", "MEAN", NOT_COMBINED)
"""What a lookup makes of the rows of a bag, by the names of TorchRec's ``PoolingType``."""


@dataclass(frozen=True)
class NodeKind:
    """One kind of node. What passes decide about its nodes are attributes; all else follows from the place of a node in
    its graph, and from the graph's context.
    """

    name: str  # a node is printed as ``<collection fqn>_<name>``
    meaning: str  # a description in one sentence
    inputs: tuple[Input, ...]  # in order
    stage: Stage  # of a step
    outputs: tuple[ValueType, ...] = ()  # one is the node's value itself; several are items of the value
    cut_before: bool = False  # whether a pipeline may do other work before it; such kinds are declared as they run
    first_alone: bool = False  # whether the value may also be the first of several outputs, if no other is needed
    once: tuple[str, ...] = ()  # what it does at most once per table, named after the kind that does nothing else
    attributes: Mapping[str, type] = field(default_factory=dict)  # their types, in the order in which they are printed
    like_input: bool = False  # whether its one output, then left out, is like its first input, of the same tables

    def __post_init__(self) -> None:
        if self.like_input and not self.outputs and self.inputs:
            object.__setattr__(self, "outputs", self.inputs[0].types[:1])


_HASHED: Mapping[str, type] = {"hashed": tuple, "operators": str}
_FROZEN: Mapping[str, type] = {"frozen": bool}
_LOOKED_UP: Mapping[str, type] = {"tables": tuple, "combine": str, "stored": tuple, "kernel": str}
_IDS = Input((ValueType.IDS,))
_HERE = (ValueType.IDS, ValueType.ARRIVED_IDS)
_HASHABLE = (*_HERE, ValueType.HOST_IDS)
_OWN = (ValueType.IDS, ValueType.HOST_IDS, ValueType.DIFFERENT_IDS)
_POOLED = (ValueType.POOLED, ValueType.ARRIVED_POOLED)

NODE_KINDS: dict[str, NodeKind] = {
    kind.name: kind
    for kind in (
        NodeKind(
            "collection",
            "a collection that has not been expanded yet",
            inputs=(Input((ValueType.BATCH,)),),
            outputs=(ValueType.KEYED_TENSOR,),
            stage=Stage.ASSEMBLE,
        ),
        NodeKind(
            "select_features",
            "puts keys into the collection's order, by name; unknown keys are dropped, and a missing key is an error",
            inputs=(Input((ValueType.BATCH,)),),
            outputs=(ValueType.IDS,),
            stage=Stage.SELECT,
        ),
        NodeKind(
            "dedup_ids",
            "leaves out ids of a key that an earlier sample of the batch has, or an earlier place of the same one",
            inputs=(Input((ValueType.IDS, ValueType.HOST_IDS)),),
            outputs=(ValueType.DIFFERENT_IDS, ValueType.INVERSE),
            stage=Stage.INPUT_DIST,
            attributes={"deduped": tuple},
        ),
        NodeKind(
            "bucketize",
            "row-wise routing: sends each id to the rank that owns its row or its bucket of rows",
            inputs=(Input(_OWN),),
            outputs=(ValueType.ROUTED_IDS,),
            stage=Stage.INPUT_DIST,
        ),
        NodeKind(
            "input_dist_start",
            "all-to-all of ids, started",
            inputs=(Input((*_OWN, ValueType.ROUTED_IDS)),),
            outputs=(ValueType.IDS_IN_FLIGHT, ValueType.CONTEXT_IN_FLIGHT),
            stage=Stage.INPUT_DIST,
            cut_before=True,
        ),
        NodeKind(
            "input_dist_wait",
            "all-to-all of ids, waited for",
            inputs=(Input((ValueType.IDS_IN_FLIGHT,)), Input((ValueType.CONTEXT_IN_FLIGHT,))),
            outputs=(ValueType.ARRIVED_IDS, ValueType.DIST_CONTEXT),
            stage=Stage.INPUT_DIST,
            cut_before=True,
        ),
        NodeKind(
            "to_host",
            "copies ids from the device of the tables to the host, where the indexes are, into pinned memory",
            inputs=(Input(_HERE),),
            outputs=(ValueType.HOST_IDS,),
            stage=Stage.INPUT_DIST,
            attributes={"with_bags": bool},
        ),
        NodeKind(
            "hash_ids",
            "the tables' indexes: find or insert in training, find in eval",
            inputs=(Input(_HASHABLE),),
            outputs=(ValueType.ROWS, ValueType.BATCH_IN_FLIGHT),
            stage=Stage.HASH,
            cut_before=True,
            first_alone=True,
            once=("hash_ids",),
            attributes=_HASHED,
        ),
        NodeKind(
            "find_rows",
            "the rows of ids in copies of the indexes, with the policy's answers for ids without a row, where the ids "
            "and the tables are",
            inputs=(Input(_HERE),),
            outputs=(ValueType.DEVICE_ROWS, ValueType.BATCH_IN_FLIGHT),
            stage=Stage.HASH,
            first_alone=True,
            once=("hash_ids",),
            attributes={**_HASHED, **_FROZEN},
        ),
        NodeKind(
            "to_device",
            "copies rows from pinned memory of the host to the device of the tables, without waiting for the device",
            inputs=(Input((ValueType.ROWS,)),),
            outputs=(ValueType.DEVICE_ROWS,),
            stage=Stage.LOOKUP,
        ),
        NodeKind(
            "lookup",
            "one table-batched lookup per group of tables; combine says what becomes of the rows of a bag: their SUM, "
            "their MEAN, or NONE if they stay as they are",
            inputs=(
                Input((*_HERE, ValueType.ROWS, ValueType.DEVICE_ROWS)),
                Input((ValueType.BATCH_IN_FLIGHT,), optional=True),
            ),
            outputs=(ValueType.POOLED,),
            stage=Stage.LOOKUP,
            once=("lookup",),
            attributes=_LOOKED_UP,
        ),
        NodeKind(
            "hash_lookup",
            "hash_ids and lookup in one kernel, if the target has one",
            inputs=(Input(_HERE),),
            outputs=(ValueType.POOLED,),
            stage=Stage.LOOKUP,
            once=("hash_ids", "lookup"),
            attributes={**_HASHED, **_FROZEN, **_LOOKED_UP},
        ),
        NodeKind(
            "output_dist_start",
            "all-to-all or reduce-scatter of pooled rows, or all-to-all of a row for each id, started",
            inputs=(Input((*_POOLED, ValueType.UNPOOLED), repeats=True), Input((ValueType.DIST_CONTEXT,))),
            outputs=(ValueType.POOLED_IN_FLIGHT,),
            stage=Stage.OUTPUT_DIST,
            attributes={"way": str, "hop": int},
        ),
        NodeKind(
            "output_dist_wait",
            "all-to-all or reduce-scatter of pooled rows, waited for; rows of ids are put into the order of the ids",
            inputs=(Input((ValueType.POOLED_IN_FLIGHT, ValueType.UNPOOLED_IN_FLIGHT)),),
            outputs=(ValueType.ARRIVED_POOLED,),
            stage=Stage.OUTPUT_DIST,
            cut_before=True,
        ),
        NodeKind(
            "expand_rows",
            "gives every id the row of the different id that it is; the backward sums the gradients of equal ids",
            inputs=(Input((ValueType.ARRIVED_UNPOOLED,)), Input((ValueType.INVERSE,))),
            outputs=(ValueType.EXPANDED,),
            stage=Stage.ASSEMBLE,
        ),
        NodeKind(
            "mean_divide",
            "divides features that are MEAN but whose lookup ran as SUM by max(length, 1)",
            inputs=(Input(_POOLED), _IDS),
            outputs=(ValueType.DIVIDED,),
            stage=Stage.ASSEMBLE,
            attributes={"divided": tuple},
        ),
        NodeKind(
            "keyed_tensor",
            "TorchRec's output type, in the unsharded key order",
            inputs=(Input((*_POOLED, ValueType.DIVIDED), repeats=True),),
            outputs=(ValueType.KEYED_TENSOR,),
            stage=Stage.ASSEMBLE,
        ),
        NodeKind(
            "jagged_dict",
            "TorchRec's output type for rows that are not pooled, one JaggedTensor per key, in the unsharded key order",
            inputs=(Input((ValueType.UNPOOLED, ValueType.ARRIVED_UNPOOLED, ValueType.EXPANDED), repeats=True), _IDS),
            outputs=(ValueType.JAGGED_DICT,),
            stage=Stage.ASSEMBLE,
        ),
    )
}

UNPOOLED_FORMS = {
    ValueType.POOLED: ValueType.UNPOOLED,
    ValueType.POOLED_IN_FLIGHT: ValueType.UNPOOLED_IN_FLIGHT,
    ValueType.ARRIVED_POOLED: ValueType.ARRIVED_UNPOOLED,
}
"""What the values that kinds declare are in collections whose rows are not combined."""

ASSEMBLERS = ("keyed_tensor", "jagged_dict")
"""The kinds whose value is a collection's output."""

CUTS: tuple[str, ...] = tuple(kind.name for kind in NODE_KINDS.values() if kind.cut_before)
"""The kinds before which a pipeline may do other work, in the order in which they run."""
