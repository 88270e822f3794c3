"""What is refused: the error's type, reason code, module path and message, and a model that runs as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.pooled import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.errors import ConversionError, InputError
from recfx.hashing import HashConfig
from recfx.replacement.conversion_record import conversion_of
from tests.builders.batches import batch
from tests.builders.collections import collection, table, two_tables
from tests.builders.optimizers import attach
from tests.models import REFUSED
from tests.models.case import tensors_in
from tests.models.handwritten import Tower
from tests.models.refused import Doubled, Holder, Refused
from tests.support.refusals import refused

each_refused = pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])


def _outputs(model: nn.Module, features: KeyedJaggedTensor) -> list[torch.Tensor]:
    """The outputs in eval mode, because managed collision learns in training."""
    model.eval()
    return [tensor.clone() for tensor in tensors_in(model(features))]


@each_refused
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_model_is_refused_and_still_runs(case: Refused, inplace: bool) -> None:
    with case.around():
        model, features = case.build(), batch(4)
        before = _outputs(model, features) if case.runs else []
        modules = list(model.modules())
        with pytest.raises(ConversionError) as raised:
            convert(model, inplace=inplace, verify=False)
        error = raised.value
        assert error.reason == case.reason
        assert error.module_path == case.module_path
        assert case.says in str(error)
        assert f"[{case.reason}]" in str(error)
        assert error.what_to_do
        assert [id(module) for module in model.modules()] == [id(module) for module in modules]
        if case.runs:
            assert all(map(torch.equal, before, _outputs(model, features)))


@each_refused
def test_a_sample_does_not_change_the_reason(case: Refused) -> None:
    with case.around():
        model = case.build()
        with refused(case.reason):
            convert(model, (batch(4),), verify=False)


class _Half(nn.Module):
    """One collection that can be converted beside one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = collection()
        self.doubled = Doubled(tables=two_tables())

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([self.plain(features).values(), self.doubled(features).values()], dim=1)


def test_keep_leaves_what_cannot_be_converted() -> None:
    model, features = _Half(), batch(4)
    converted = convert(model, (features,), on_unsupported="keep", verify=False)
    assert isinstance(converted.plain, HashEmbeddingBagCollection)
    assert isinstance(converted.doubled, Doubled)
    torch.testing.assert_close(converted(features), model(features), rtol=1e-5, atol=1e-6)
    found = {record.paths[0]: (record.status, record.why) for record in conversion_of(converted).found}
    assert found["plain"] == ("converted", None)
    status, why = found["doubled"]
    assert why is not None
    assert (status, why.code, why.path) == ("refused", "own_forward", "doubled")


def test_the_first_refusal_says_how_many_more_there_are() -> None:
    model = nn.ModuleList([Doubled(tables=two_tables()) for _ in range(3)])
    with pytest.raises(ConversionError, match="2 more") as raised:
        convert(model)
    assert raised.value.module_path == "0"


# Arguments


@pytest.mark.parametrize(
    ("arguments", "reason", "says"),
    [
        ({"on_unsupported": "ignore"}, "invalid_argument", "'keep'"),
        ({"hashing": 5}, "invalid_argument", "HashConfig"),
        ({"hashing": {"t3": HashConfig()}}, "unknown_table", "t1"),
        ({"plan": object()}, "invalid_argument", "ShardingPlan"),
        ({"env": object()}, "invalid_argument", "ShardingEnv"),
        ({"whole_graph": True}, "sample_required", "sample"),
        ({"verify": True}, "sample_required", "sample"),
        ({"backend": "cudnn"}, "unknown_backend", "fbgemm"),
        ({"hashing": HashConfig(rows=10)}, "rows_shrink", "20"),
        ({"hashing": HashConfig(dense_rows=21)}, "invalid_hash_config", "dense_rows"),
    ],
)
def test_an_argument_is_refused(arguments: dict[str, object], reason: str, says: str) -> None:
    model, features = Tower(), batch(4)
    before = model(features)
    with refused(reason) as raised:
        convert(model, **{"verify": False, **arguments})  # type: ignore[arg-type]
    assert says in str(raised.value)
    assert torch.equal(model(features), before)


def test_a_named_backend_that_cannot_serve_a_table_is_refused() -> None:
    with refused("backend_unusable", "ebc", match="bfloat16"):
        convert(Tower().bfloat16(), backend="fbgemm")


@pytest.mark.parametrize(
    "hashing",
    [
        HashConfig(dense_rows=0),
        HashConfig(rows=30),
        {"t1": HashConfig(dense_rows=0)},
        {"t2": HashConfig(dense_rows=0)},
    ],
    ids=["both", "both_grow", "first", "second"],
)
def test_an_index_over_a_weight_that_two_tables_share_is_refused(hashing: HashConfig) -> None:
    """Rows that one table gives out to ids would be dense ids of the other."""
    model = Tower()
    model.ebc.embedding_bags["t2"].weight = model.ebc.embedding_bags["t1"].weight
    with refused("tied_tables", "ebc"):
        convert(model, hashing=hashing)
    assert model.ebc.embedding_bags["t1"].weight.shape == (20, 8)
    assert convert(model)(batch(3)).shape == (3, 4)


def test_sgd_with_momentum_in_backward_is_refused() -> None:
    """The table-batched SGD would ignore it."""
    model, features = Tower(), batch(4)
    attach(model.ebc, torch.optim.SGD, momentum=0.9)
    with refused("unsupported_optimizer_argument", "ebc", match="momentum"):
        convert(model, verify=False)
    model(features).sum().backward()


# Batches


def _refuses(model: nn.Module, features: KeyedJaggedTensor, error: type[Exception], reason: str) -> InputError:
    with pytest.raises(error) as raised:
        model(features)
    assert isinstance(raised.value, InputError)
    assert raised.value.reason == reason
    assert raised.value.module_path == "ebc"
    model(batch(4))  # the next batch is served
    return raised.value


@pytest.mark.parametrize("hashing", [HashConfig(), HashConfig(dense_rows=0), None], ids=["dense", "hashed", "static"])
def test_a_missing_feature_is_named(hashing: HashConfig | None) -> None:
    model = convert(Tower(), hashing=hashing)
    error = _refuses(model, batch(4, ["f1", "f3"]), KeyError, "missing_feature")
    assert "'f2'" in str(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.complex64])
@pytest.mark.parametrize("hashing", [HashConfig(), HashConfig(dense_rows=0), None], ids=["dense", "hashed", "static"])
def test_ids_of_another_dtype_are_refused(hashing: HashConfig | None, dtype: torch.dtype) -> None:
    features = batch(4)
    wrong = KeyedJaggedTensor(features.keys(), features.values().to(dtype), lengths=features.lengths())
    error = _refuses(convert(Tower(), hashing=hashing), wrong, TypeError, "wrong_id_dtype")
    assert str(dtype) in str(error)


@pytest.mark.parametrize("bad", [20, 2**40, -1, -(2**63)])
@pytest.mark.parametrize("position", [0, 4], ids=["first_table", "second_table"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_id_beyond_an_adopted_table_is_named_with_the_way_out(bad: int, position: int, training: bool) -> None:
    values = torch.tensor([1, 2, 3, 4, 5, 6])
    values[position] = bad
    features = KeyedJaggedTensor(["f1", "f2", "f3"], values, lengths=torch.tensor([2, 0, 1, 1, 1, 1]))
    error = _refuses(convert(Tower()).train(training), features, IndexError, "id_out_of_range")
    assert str(bad) in str(error)
    assert ("'f1'" if position == 0 else "'f3'") in str(error)
    assert ("'t1'" if position == 0 else "'t2'") in str(error)
    assert "dense_rows=0" in str(error)


@pytest.mark.parametrize("backend", ["cpu", "fbgemm", "reference"])
@pytest.mark.parametrize("bad", [20, 2**40, -1])
def test_a_static_table_never_reads_beyond_its_rows(backend: str, bad: int) -> None:
    """As the standard collection: an error, not somebody else's memory."""
    model = convert(Tower(), hashing=None, backend=backend)
    features = KeyedJaggedTensor(["f1", "f2", "f3"], torch.tensor([1, bad, 3]), lengths=torch.tensor([1, 1, 1]))
    with pytest.raises((IndexError, RuntimeError), match=str(bad)):
        model(features)


def test_an_excess_feature_is_not_checked() -> None:
    model = convert(Tower())
    features = KeyedJaggedTensor(
        ["f1", "other", "f2", "f3"], torch.tensor([1, 2**40, 3, 4]), lengths=torch.tensor([1, 1, 1, 1])
    )
    assert model(features).shape == (1, 4)


def test_missing_weights_are_refused() -> None:
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table("t1", ["f1"])], is_weighted=True)})
    ebc = convert(model)["ebc"]
    with refused("missing_weights", "ebc", match="weights", error=InputError):
        ebc(batch(4, ["f1"]))
    ebc(batch(4, ["f1"], weighted=True))


def test_a_variable_batch_without_inverse_indices_is_refused() -> None:
    features = KeyedJaggedTensor(
        ["f1", "f2", "f3"],
        torch.tensor([1, 2, 3, 4, 5, 6]),
        lengths=torch.tensor([1, 1, 1, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [2], [3]],
    )
    error = _refuses(convert(Tower()), features, ValueError, "variable_batch_without_inverse_indices")
    assert "inverse_indices" in str(error)


def test_a_holder_of_nothing_but_tables_is_converted() -> None:
    """The other side of the refusals: what looks alike and is fine."""
    assert isinstance(convert(Holder(collection())).arch.sparse, HashEmbeddingBagCollection)
