"""A new kind of collection is one file and one line in each list of kinds; everything else asks the kind."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.collections.kinds import kind_of, shown_by, standard_kind, table_in
from tests.sharding.ranks import ranks
from tests.support.refusals import refused
from tests.toys import stacks
from tests.toys.stacks import STACKS, HashStacks, ShardedStacks, StackConfig, Stacks

KEYS = ["sparse.stacks.a.weight", "sparse.stacks.b.weight"]


class Model(nn.Module):
    """A collection, and something that reads its output."""

    def __init__(self, collection: type[Stacks] = Stacks) -> None:
        super().__init__()
        tables = (("a", ["f0", "f1"], 12), ("b", ["f2"], 20))
        self.sparse = collection([StackConfig(rows, 8, name, feature_names=names) for name, names, rows in tables])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Sum everything."""
        values: torch.Tensor = self.sparse(features).values()
        return values


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


@pytest.mark.usefixtures("toy")
def test_subclasses_and_refusals() -> None:
    class Named(Stacks):
        def label(self) -> str:
            return f"{len(self.stack_configs())} tables"

    class Own(Stacks):
        def forward(self, features: KeyedJaggedTensor) -> Any:
            return super().forward(features)

    converted: Any = recfx.convert(Model(Named)).get_submodule("sparse")
    assert isinstance(converted, HashStacks)
    assert isinstance(converted, Named)
    assert converted.label() == "2 tables"
    assert type(copy.deepcopy(converted)) is type(converted)
    with refused("own_forward"):
        recfx.convert(Model(Own))


@pytest.mark.usefixtures("toy")
def test_raw_ids_fused_steps_checkpoints_and_files(tmp_path: Path) -> None:
    def trained(model: nn.Module, steps: int) -> nn.Module:
        for step in range(steps):
            model(batch(step, 1 << 40)).sum().backward()
        return model

    def made() -> nn.Module:
        model = recfx.convert(Model(), hashing=recfx.HashConfig(dense_rows=0, rows=400))
        apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.1})
        return model

    model, other = trained(made(), 3), made()
    fused = model.get_submodule("sparse").fused_optimizer
    assert list(fused.params) == [key.removeprefix("sparse.") for key in KEYS]  # type: ignore[operator]
    assert "sparse.hash_indexes.a.row_ids" in model.state_dict()
    recfx.save_checkpoint(model, tmp_path / "saved")
    recfx.load_checkpoint(other, tmp_path / "saved")
    assert torch.equal(other.eval()(batch(1, 1 << 40)), model.eval()(batch(1, 1 << 40)))
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(batch(1, 1 << 40)), model(batch(1, 1 << 40)))
    recfx.export(model, tmp_path / "model.pt", (batch(1, 1 << 40),))
    torch.testing.assert_close(recfx.load(tmp_path / "model.pt")(batch(2, 1 << 40)), model(batch(2, 1 << 40)))


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


def test_without_its_lines_it_is_unknown() -> None:
    assert standard_kind(Stacks([])) is None
    assert shown_by(Stacks([])) is None
    assert table_in("m.stacks.a") == ("m.stacks.a", "")
    with pytest.raises(TypeError, match="no collection of a known kind"):
        kind_of(Stacks([]))
    with refused("no_collection"):
        recfx.convert(Model())


@pytest.mark.usefixtures("toy")
def test_what_users_add_does_not_hide_the_kind() -> None:
    model = Model()
    model.sparse.__dict__.update(_kind="mine", kind="mine")
    converted = recfx.convert(model).get_submodule("sparse")
    assert kind_of(converted) is STACKS
    assert converted.__dict__["_kind"] == "mine"
    assert converted(batch()).keys() == ["f0", "f1", "f2"]


_POOLED_NAMES = {
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "embedding_bags",
    "embedding_bag_configs",
    "_embedding_bag_configs",
}
_ABOUT_POOLED_ONES = {
    "collections/kinds.py": "the kind",
    "collections/hash_collections.py": "the class and the config that users build",
    "discovery/classify.py": "the quantized one, which is refused",
}


def test_no_other_file_names_the_pooled_kind() -> None:
    package = Path(recfx.__file__).parent
    naming = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = {getattr(node, field, None) for field in ("id", "attr", "name", "value")}
            if any(isinstance(constant, str) and constant in _POOLED_NAMES for constant in named):
                naming.add(str(path.relative_to(package)))
    assert naming == set(_ABOUT_POOLED_ONES)
