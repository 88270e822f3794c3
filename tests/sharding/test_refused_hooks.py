"""TorchRec's tools that wait for hooks of its own sharded modules are refused by name, instead of recording nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection

import recfx
from tests.builders.batches import one_bag
from tests.builders.collections import tables_named
from tests.sharding.ranks import ranks
from tests.support.needs import needed

_TRACKER = "torchrec.distributed.model_tracker"
DeltaTrackerConfig = needed(f"{_TRACKER}.types.DeltaTrackerConfig", "TorchRec 1.5")
ModelDeltaTrackerTrec = needed(f"{_TRACKER}.model_delta_tracker.ModelDeltaTrackerTrec", "TorchRec 1.5")
ModelTrackerConfigs = needed(f"{_TRACKER}.types.ModelTrackerConfigs", "TorchRec 1.5")
RawIdTracker = needed(f"{_TRACKER}.trackers.raw_id_tracker.RawIdTracker", "TorchRec 1.5")
RawIdTrackerConfig = needed(f"{_TRACKER}.types.RawIdTrackerConfig", "TorchRec 1.5")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = tables_named("t")

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.ebc(features)["t"]
        return values.sum()


def parallel(**options: Any) -> Any:
    return DistributedModelParallel(recfx.convert(Model()), device=torch.device("cpu"), **options)


TOOLS: dict[str, Callable[[], Any]] = {
    "delta tracker": lambda: ModelDeltaTrackerTrec(model=parallel(), fqns_to_skip=["other"]),
    "delta tracker of model parallel": lambda: parallel().init_torchrec_delta_tracker(DeltaTrackerConfig()),
    "raw id tracker": lambda: RawIdTracker(parallel()),
    "raw id tracker of model parallel": lambda: parallel(
        model_tracker_configs=ModelTrackerConfigs(raw_id_tracker_config=RawIdTrackerConfig())
    ),
}


def refused(rank: int, world_size: int, tool: str) -> tuple[str, str]:
    with pytest.raises(recfx.ConversionError) as caught:
        TOOLS[tool]()
    return caught.value.reason, caught.value.module_path.rpartition("ebc")[1]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_would_be_told_nothing(tool: str) -> None:
    assert ranks(1).run(refused, tool) == [("torchrec_hook_not_called", "ebc")]


def allowed(rank: int, world_size: int) -> list[str]:
    """What skips the collections, and what TorchRec's own ones are told."""
    model = parallel()
    assert ModelDeltaTrackerTrec(model, fqns_to_skip=["ebc"]).get_tracked_modules() == {}
    stock = DistributedModelParallel(Model(), device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder()])
    tracker = ModelDeltaTrackerTrec(stock)
    tracker.step()
    stock(one_bag(0, 1, feature="t"))
    return [name.rpartition("ebc.")[2] for name in tracker.get_unique_ids()]


def test_what_skips_converted_collections_and_what_tracks_others() -> None:
    assert ranks(1).run(allowed) == [["embedding_bags.t"]]


def in_two_dimensions(rank: int, world_size: int) -> str:
    """Its own constructor takes only CUDA; it calls this one."""
    model = recfx.convert(Model())  # whose first use gives TorchRec's classes their checks
    with pytest.raises(recfx.ConversionError) as caught:
        DistributedModelParallel.__init__(DMPCollection.__new__(DMPCollection), model)
    return caught.value.reason


def test_tables_that_would_never_be_synchronised() -> None:
    assert ranks(1).run(in_two_dimensions) == ["two_dimensional_parallelism"]
