"""Rows and gradients that travel in fp16 or bf16, as TorchRec's codecs round them, and as the graph says."""

from dataclasses import replace
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

import recfx
from recfx.ir import format_graph
from recfx.ir.operator_graph import lowered_from
from tests.sharding.cases import FORMS, Case, batches, build, concatenate, shard, shards_of, values_by_rank, values_of
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.typical_cases import MIXED, TYPES, one_type
from tests.support.pairwise import pairwise

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIRES = [("fp16*4.0", "bf16"), ("bf16", "fp32"), ("fp32", "fp16")]
LEARNING_RATE = 0.5  # of "dyadic_sgd"


def inputs(case: Case, world_size: int, dyadic: bool) -> list[KeyedJaggedTensor]:
    """The batch of each rank: bags of several ids, or each id on one rank, once in each feature."""
    if dyadic:
        return batches(case, world_size, 1)[0]
    size = 4 // world_size
    lengths = torch.ones(2 * size, dtype=torch.int64)
    return [
        KeyedJaggedTensor(["f0", "f1"], torch.arange(rank * size, (rank + 1) * size).repeat(2), lengths=lengths)
        for rank in range(world_size)
    ]


def collection(case: Case, dyadic: bool) -> Any:
    """The standard collection: numbers that every precision has, and so have their sums; or others."""
    standard, _ = build(case)
    generator = torch.Generator().manual_seed(3)
    for weight in standard.parameters():
        whole = torch.randint(-7, 8, weight.shape, generator=generator)
        weight.data.copy_(whole / 4 if dyadic else torch.rand(weight.shape, generator=generator))
    return standard


def gradient_of(values: torch.Tensor, rank: int, dyadic: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dyadic:
        return torch.randint(-3, 4, values.shape, generator=generator).float()
    return torch.rand(values.shape, generator=generator)


def step(rank: int, world_size: int, case: Case, dyadic: bool) -> tuple[torch.Tensor, Any, str]:
    """What a rank gets, its shards after a step, and the text of its graph, which can be read back."""
    sharded = shard(case, collection(case, dyadic), world_size)
    values = values_of(sharded(inputs(case, world_size, dyadic)[rank]))
    values.backward(gradient_of(values, rank, dyadic))
    operator = lowered_from(next(node for node in sharded.graph_module.graph.nodes if node.op == "call_module"))
    assert operator is not None
    return values.detach(), shards_of(sharded), format_graph(operator.graph)


@pairwise(kind=sorted(TYPES), world_size=[2, 4], form=FORMS, wire=WIRES, dyadic=[True, False], sizes=[(3,), (4, 1)])
def test_ranks_send_what_the_wire_holds(
    kind: str, world_size: int, form: str, wire: tuple[str, str], dyadic: bool, sizes: tuple[int, ...]
) -> None:
    case = one_type(kind, local_size=2 if world_size == 4 else 0, wire=wire, optimizer="dyadic_sgd", sizes=sizes)
    if dyadic:  # numbers that are divided by lengths have no end
        case = replace(case, tables=tuple(replace(table, pooling="SUM") for table in case.tables))
    case = FORMS[form](case)
    answers = ranks(world_size).run(step, case, dyadic)

    is_sent = kind != "data_parallel"
    forward, backward = (DTYPES[name.partition("*")[0]] if is_sent else torch.float32 for name in wire)
    standard, every = collection(case, dyadic), inputs(case, world_size, dyadic)
    values = values_by_rank(standard(concatenate(every)), [batch.stride() for batch in every])
    gradients = [gradient_of(part, rank, dyadic).to(backward).float() for rank, part in enumerate(values)]
    torch.autograd.backward(values, gradients)
    weights = dict(zip([table.name for table in case.tables], standard.parameters(), strict=True))
    precisions = zip(("wire", "wire_backward"), wire, strict=True)
    said = ", ".join(f"{key}={repr(name) if '*' in name else name}" for key, name in precisions if name != "fp32")
    lines = {line.partition("operation=")[2] for _, _, text in answers for line in text.splitlines()}
    operations = {line.partition(",")[0].strip("}") for line in lines} - {"", "own_batch", "own_rows"}
    if world_size == 2:  # one host
        operations.discard("cross_host")
    assert {f"{operation}, {said}}}" for operation in operations} == {line for line in lines if "wire" in line}
    assert bool(operations) == is_sent
    for (ours, shards, _), theirs in zip(answers, values, strict=True):
        assert torch.equal(ours, theirs.detach().to(forward).float())
        for table, (first, end), (left, right), weight in shards:
            moved = weights[table] - LEARNING_RATE * weights[table].grad / world_size
            assert torch.equal(weight, moved.detach()[first:end, left:right]), f"table {table}"


@on_ranks(2)
def test_the_report_says_in_which_precision_rows_travel(rank: int, world_size: int) -> None:
    case = Case(MIXED, wire=("fp16", "bf16"))
    sent = "fp16 forward, bf16 backward"
    sharded = recfx.explain(shard(case, build(case)[0], world_size)).collections[0]
    travels = [table.sharding.travels for table in sharded.tables if table.sharding is not None]
    assert travels == [f"all-to-all, {sent}", f"summed over ranks, {sent}", "stay", f"all-to-all, {sent}"]
