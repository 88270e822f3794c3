"""A new kind of collection is one file and one line in each list of kinds; everything else asks the kind."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.collections.kinds import kind_of
from tests.sharding.ranks import ranks
from tests.toys import stacks
from tests.toys.stacks import STACKS, HashStacks, ShardedStacks, StackConfig, Stacks

KEYS = ["sparse.stacks.a.weight", "sparse.stacks.b.weight"]


class Model(nn.Module):
    def __init__(self, collection: type[Stacks] = Stacks) -> None:
        super().__init__()
        tables = (("a", ["f0", "f1"], 12), ("b", ["f2"], 20))
        self.sparse = collection([StackConfig(rows, 8, name, feature_names=names) for name, names, rows in tables])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.sparse(features).values()


@pytest.fixture
def toy() -> Iterator[None]:
    with stacks.known():
        yield


def batch(seed: int = 0, largest: int = 12) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (9,), generator=generator)
    ids = torch.randint(0, largest, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=lengths)


@pytest.mark.usefixtures("toy")
def test_it_is_converted_verified_and_turned_back() -> None:
    model = Model()
    converted = recfx.convert(model, sample=(batch(),), verify=True)
    hash_stacks = converted.get_submodule("sparse")
    assert type(hash_stacks) is HashStacks
    assert kind_of(hash_stacks) is STACKS
    assert list(converted.state_dict()) == KEYS
    assert torch.equal(converted(batch(3)), model(batch(3)))
    converted.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(converted.state_dict(), strict=True)
    report = recfx.explain(converted)
    assert report.ok
    assert [collection.kind for collection in report.collections] == ["Stacks"]
    assert "keyed_tensor" in str(hash_stacks.graph_module)
    plain = recfx.unconvert(converted)
    assert isinstance(plain, nn.Module)
    assert type(plain.get_submodule("sparse")) is Stacks
    assert plain.get_parameter(KEYS[0]) is model.get_parameter(KEYS[0])
    assert torch.equal(plain(batch(4)), model(batch(4)))


def with_toy(rank: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a rank's function while the kind is known."""
    with stacks.known():
        return function(rank, world_size, *arguments)


def sharded(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(5)
    model, env = Model(), ShardingEnv.from_process_group(dist.group.WORLD)
    plan = recfx.plan(model, Topology(world_size, "cpu"))
    converted = recfx.convert(model, plan=plan, env=env)
    plain: Any = recfx.unconvert(converted)
    return {
        "class": type(converted.get_submodule("sparse")) is ShardedStacks,
        "keys": list(converted.state_dict()),
        "output": converted(batch(rank)).detach(),
        "expected": model(batch(rank)).detach(),
        "plain": type(plain.sparse) is Stacks and torch.equal(plain(batch()), model(batch())),
        "sharders": sum(sharder.module_type is HashStacks for sharder in recfx.sharders()),
    }


def test_it_is_planned_sharded_and_gathered() -> None:
    for answers in ranks(2).run(with_toy, sharded):
        assert answers["class"]
        assert answers["plain"]
        assert answers["keys"] == KEYS
        assert answers["sharders"] == 1
        torch.testing.assert_close(answers["output"], answers["expected"])
