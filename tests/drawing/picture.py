"""The screenshot on the first page, README.md: ``python -m tests.drawing.picture FILE.png``."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

import recfx
from tests.support.browser import browser, find_browser
from tests.support.fake_group import fake_group

RANKS = 8


class Ranker(nn.Module):
    """Two tables whose rows are cut, and two on one rank each."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"user": 40960, "ad": 40960, "country": 256, "device": 128}
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=32, feature_names=[name], pooling=PoolingType.SUM
                )
                for name, rows in sizes.items()
            ]
        )
        self.over = nn.Linear(128, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values())


def sharded() -> nn.Module:
    """The model as rank 0 of eight has it; nothing is sent."""
    raw_ids = recfx.HashConfig(dense_rows=0, buckets=RANKS)
    batch = KeyedJaggedTensor(
        ["user", "ad", "country", "device"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4).int()
    )
    sample = (batch,)
    converted = recfx.convert(Ranker(), sample, hashing={"user": raw_ids, "ad": raw_ids}, verify=False)
    placed = {"user": row_wise(), "ad": row_wise(), "country": table_wise(rank=0), "device": table_wise(rank=0)}
    plan = construct_module_sharding_plan(converted.ebc, placed, local_size=RANKS, world_size=RANKS, device_type="cpu")
    return recfx.convert(converted, plan=ShardingPlan({"ebc": plan}))


def main(target: Path) -> None:
    """Draw the model, and take a picture of the page as it opens: with the details of the node that costs most."""
    program = find_browser()
    if program is None:
        sys.exit("no Chromium on this machine")
    with tempfile.TemporaryDirectory() as folder, fake_group(0, RANKS), browser(program) as opened:
        recfx.draw(sharded(), Path(folder) / "model.html")
        page = opened.page()
        page.show(width=1280, height=900)
        page.open(Path(folder) / "model.html")
        page.screenshot(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
