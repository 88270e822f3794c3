"""Models with operators of the user's train in pipelines, and go on on other numbers of ranks, as one rank trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise
from torchrec.optim import apply_optimizer_in_backward

import recfx
from tests.builders.plans import plan_of_kinds
from tests.sharding.ranks import ranks
from tests.support.own_operators import forgotten_afterwards
from tests.toys.own_operators import Model, ScaleAll, declare, with_counts

Rows = dict[str, dict[int, torch.Tensor]]
STEPS = 3


class Loss(nn.Module):
    """A model that returns loss and output, as pipelines want it; here, the output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss: torch.Tensor = self.inner(features).square().sum()
        return loss, loss.detach()


def batches(goes_on: bool) -> list[KeyedJaggedTensor]:
    draw = torch.Generator().manual_seed(int(goes_on))
    drawn = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (6,), generator=draw)
        values = torch.randint(0, 10, (int(lengths.sum()),), generator=draw)
        drawn.append(KeyedJaggedTensor(["f", "g"], values, lengths=lengths))
    return drawn


def train(hashing: recfx.HashConfig, pipelined: bool, before: Path, after: Path, **how: Any) -> tuple[list[Any], Rows]:
    """Some steps after a saved state, if there is one: the losses, and the rows of all ids afterwards."""
    original = Loss()
    apply_optimizer_in_backward(torch.optim.Adagrad, original.inner.ebc.parameters(), {"lr": 0.1, "eps": 1e-2})
    model = recfx.convert(original, hashing=hashing, passes=[*with_counts(), ScaleAll(2.0)], **how)
    optimizer = torch.optim.SGD(model.inner.over.parameters(), lr=0.01)
    goes_on, losses = before.exists(), []
    if goes_on:
        recfx.load_checkpoint(model, before)
    source = batches(goes_on)
    if pipelined:
        pipeline, remaining = recfx.TrainPipeline(model, optimizer, "cpu"), iter(source)
        losses = [float(pipeline.progress(remaining)) for _ in source]
    else:
        for batch in source:
            optimizer.zero_grad()
            loss, output = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(output))
    recfx.save_checkpoint(model, after)
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    weights = {name: bag.weight.detach() for name, bag in plain.inner.ebc.embedding_bags.items()}
    known = {name: mapping.get(name, (torch.arange(10), torch.arange(10))) for name in weights}
    return losses, {
        name: {int(number): weights[name][row] for number, row in zip(*known[name], strict=True)} for name in weights
    }


def on_rank(rank: int, world_size: int, kinds: tuple[str, str], *arguments: Any) -> tuple[list[Any], Rows]:
    make = {
        "row_wise": row_wise(),
        "column_wise": column_wise(ranks=[0, world_size - 1]),
        "table_wise": table_wise(rank=world_size - 1),
    }
    with forgotten_afterwards():
        declare()
        torch.manual_seed(0)
        tables = {table: make[kind] for table, kind in zip("ab", kinds, strict=True)}
        return train(*arguments, plan=plan_of_kinds("inner.ebc", Model().ebc, tables, world_size))


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("hashing", [recfx.HashConfig(), recfx.HashConfig(dense_rows=0)])
def test_ranks_and_pipelines_train_as_one_rank_does(hashing: recfx.HashConfig, pipelined: bool, tmp_path: Path) -> None:
    with forgotten_afterwards():
        declare()
        of_one_rank = [
            train(hashing, False, tmp_path / "none", tmp_path / "alone_1"),
            train(hashing, False, tmp_path / "alone_1", tmp_path / "alone_2"),
        ]
    first = ranks(2).run(on_rank, ("column_wise", "row_wise"), hashing, pipelined, tmp_path / "none", tmp_path / "two")
    second = ranks(4).run(on_rank, ("row_wise", "table_wise"), hashing, pipelined, tmp_path / "two", tmp_path / "four")
    for of_ranks, (losses, rows) in zip((first, second), of_one_rank, strict=True):
        for of_rank, rows_of_rank in of_ranks:
            assert of_rank == pytest.approx(losses, rel=1e-4)
            assert {table: set(ids) for table, ids in rows_of_rank.items()} == {t: set(ids) for t, ids in rows.items()}
            for table, of_ids in rows.items():
                for number, row in of_ids.items():
                    torch.testing.assert_close(rows_of_rank[table][number], row, rtol=1e-4, atol=1e-5)
