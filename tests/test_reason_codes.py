"""Every reason code is named by some test; and refusals that no other test names.

Of these: error type, reason code, place, and that nothing is half changed.
"""

import ast
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from tests.builders.batches import one_bag
from tests.builders.collections import tables_named
from tests.builders.optimizers import attach
from tests.support.refusals import refused

RAW = recfx.HashConfig(dense_rows=0)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = tables_named("t")

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features).values()
        return pooled * 2 if self.training else pooled


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.part(features) + 1


@pytest.mark.parametrize("change", [{"hashing": RAW}, {"backend": "cpu"}], ids=["hashing", "backend"])
def test_converting_again_with_another_request(change: dict[str, object]) -> None:
    converted = recfx.convert(Model(), hashing=recfx.HashConfig(seed=1), backend="reference")
    assert recfx.convert(converted) is converted
    assert recfx.convert(converted, hashing=recfx.HashConfig(seed=1), backend="reference") is converted
    with pytest.raises(recfx.ConversionError, match="unconvert") as caught:
        recfx.convert(converted, **change)
    assert "save_checkpoint" not in str(caught.value)  # there is no index that could hold ids
    assert (caught.value.reason, caught.value.module_path) == ("already_converted", "part.ebc")


def test_unconvert_of_a_table_that_holds_ids() -> None:
    converted = recfx.convert(Model(), hashing=RAW)
    assert isinstance(recfx.unconvert(converted).part.ebc, EmbeddingBagCollection)
    converted(one_bag(70, 80, feature="t"))
    with pytest.raises(recfx.ConversionError, match=r"'t' holds 2 ids.*with_mapping=True.*save_checkpoint") as caught:
        recfx.unconvert(converted)
    assert (caught.value.reason, caught.value.module_path) == ("index_holds_ids", "part.ebc")
    assert len(converted.part.ebc.index("t")) == 2


def test_a_graph_does_not_run_parts_in_the_other_mode() -> None:
    graph = recfx.convert(Model(), (one_bag(1, feature="t"),), whole_graph=True)
    graph.part.eval()
    with pytest.raises(recfx.ConversionError) as caught:
        graph(one_bag(1, feature="t"))
    assert (caught.value.reason, caught.value.module_path) == ("mixed_modes", "part")
    model = Model()
    model.part.eval()
    with refused("mixed_modes"):
        recfx.trace(model, (one_bag(1, feature="t"),))


def test_a_mode_in_which_the_model_cannot_run_is_named() -> None:
    class OnlyEval(Model):
        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return super().forward(features) + self.missing if self.training else super().forward(features)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = OnlyEval()

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return self.inner(features)

    graph = recfx.convert(Outer(), (one_bag(1, feature="t"),), whole_graph=True)
    reasons = [reason for reason in recfx.explain(graph).reasons if reason.code == "not_compared"]
    assert len(reasons) == 1
    assert "train mode" in reasons[0].message


def test_a_collection_without_tables() -> None:
    with refused("no_tables"):
        recfx.HashEmbeddingBagCollection([])
    (entry,) = recfx.explain(recfx.convert(nn.Sequential(EmbeddingBagCollection([])))).collections
    assert (entry.status, entry.reason) == ("kept", "no_tables")


def test_two_optimizers_in_backward_run_as_before() -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        for rate in (0.1, 0.2):
            attach(one, torch.optim.SGD, lr=rate)
    converted = recfx.convert(model)
    (reason,) = [reason for reason in recfx.explain(converted).reasons if reason.code == "optimizer_not_fused"]
    assert "2 optimizers" in reason.message
    assert converted.part.ebc.not_fused["t"].code == "several_optimizers"
    for one in (converted, plain):
        one(one_bag(1, 2, feature="t")).sum().backward()
    torch.testing.assert_close(converted.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


def test_pooling_that_is_neither_sum_nor_mean() -> None:
    model = Model()
    model.part.ebc.embedding_bag_configs()[0].pooling = PoolingType.NONE
    model.part.ebc.embedding_bags["t"].mode = "none"
    with refused("unsupported_pooling", match="NONE"):
        recfx.convert(model)


def test_a_conversion_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    from recfx.runtime.assemble import AssembleKeyedTensor

    right: Callable[..., object] = AssembleKeyedTensor.forward
    monkeypatch.setattr(AssembleKeyedTensor, "forward", lambda self, *pooled: right(self, *(p + 1 for p in pooled)))
    model = Model()
    with refused("verification_failed", match="outputs 0"):
        recfx.convert(model, (one_bag(1, feature="t"),), hashing=recfx.HashConfig(rows=30))
    assert model.part.ebc.embedding_bags["t"].weight.shape == (10, 4)


def test_a_collection_that_is_kept_after_all_keeps_its_rows() -> None:
    """Its first table could grow, its second cannot: neither may."""
    model = nn.ModuleDict({"good": tables_named("g"), "bad": tables_named("a", "b")})
    attach([model["bad"].embedding_bags["b"].weight], torch.optim.SGD)
    before = copy.deepcopy(model.state_dict())
    converted = recfx.convert(model, hashing=recfx.HashConfig(rows=30), on_unsupported="keep")
    by_path = {
        collection.paths[0]: (collection.status, collection.reason)
        for collection in recfx.explain(converted).collections
    }
    assert by_path["bad"] == ("refused", "optimizer_holds_state")
    assert by_path["good"][0] == "converted"
    assert converted["good"].weight("g").shape == (30, 4)
    for table in ("a", "b"):
        name = f"bad.embedding_bags.{table}.weight"
        assert torch.equal(converted.state_dict()[name], before[name])


ROOT = Path(__file__).resolve().parents[1]
# What takes a code as its first argument. Errors take it as ``reason=``.
TAKE_A_CODE = {"Diagnostic", "refuse", "refused", "kept", "_refuse", "_not_fused"}


def codes_of(source: str) -> Iterator[str]:
    """The reason codes that the code gives, as literals or by a constant of its file."""
    tree = ast.parse(source)
    constants = {
        str(target.id): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        given = [keyword.value for keyword in call.keywords if keyword.arg in ("reason", "code")]
        if (getattr(call.func, "attr", "") or getattr(call.func, "id", "")) in TAKE_A_CODE:
            given += call.args[:1]
        for part in (part for value in given for part in ast.walk(value)):
            part = constants.get(part.id, part) if isinstance(part, ast.Name) else part
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and re.fullmatch("[a-z_]+", part.value):
                yield part.value


SOURCES = [path for folder in ("recfx", "lowering", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]


def without_code(source: str) -> list[int]:
    """The lines that make an error of recfx without a reason code."""
    calls = [call for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call)]
    errors = [call for call in calls if getattr(call.func, "id", "") in vars(recfx.errors) and call.args]
    return [
        call.lineno
        for call in errors
        if getattr(call.func, "id", "").endswith("Error") and "reason" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_error_has_a_code() -> None:
    """Only torch makes some without, which have one in their text."""
    assert without_code('InputError("m", reason="a_code")\nInputError("m")\nValueError("m")') == [2]
    assert not [(path, lines) for path in SOURCES if (lines := without_code(path.read_text()))]


def test_every_code_is_named_by_a_test() -> None:
    codes = {code for path in SOURCES for code in codes_of(path.read_text())}
    tested = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")))
    assert len(codes) > 150
    assert not sorted(code for code in codes if not re.search(rf"[\"'\[(]{code}\b", tested))
