"""The screenshot on the first page, README.md: ``python -m tests.drawing.picture FILE.png``."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

import recfx
from tests.builders.collections import table
from tests.builders.models import Over
from tests.support.browser import browser, find_browser
from tests.support.fake_group import fake_group

RANKS = 8


def sharded() -> nn.Module:
    """The model as rank 0 of eight has it; nothing is sent."""
    raw_ids = recfx.HashConfig(dense_rows=0, buckets=RANKS)
    batch = KeyedJaggedTensor(
        ["user", "ad", "country", "device"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4).int()
    )
    sample = (batch,)
    sizes = {"user": 40960, "ad": 40960, "country": 256, "device": 128}  # rows of two of them are cut
    model = Over(EmbeddingBagCollection([table(name, [name], rows=rows, dim=32) for name, rows in sizes.items()]), 128)
    converted = recfx.convert(model, sample, hashing={"user": raw_ids, "ad": raw_ids}, verify=False)
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
