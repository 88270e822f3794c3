"""What is refused: the error's type, reason code, module path and message, and a model that runs as before."""

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.errors import ConversionError, InputError
from recfx.hashing import HashConfig
from recfx.models.conversion_record import conversion_of
from tests.builders.batches import batch
from tests.builders.collections import collection, two_tables
from tests.models import REFUSED
from tests.models.case import tensors_in
from tests.models.handwritten import Tower
from tests.models.refused import Doubled, Refused
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
        assert error.what_to_do
        assert [id(module) for module in model.modules()] == [id(module) for module in modules]
        if case.runs:
            assert all(map(torch.equal, before, _outputs(model, features)))


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
    outcomes = {record.paths[0]: (record.status, record.why) for record in conversion_of(converted).found}
    assert outcomes["plain"] == ("converted", None)
    status, why = outcomes["doubled"]
    assert why is not None
    assert (status, why.code, why.path) == ("refused", "own_forward", "doubled")


# Arguments


@pytest.mark.parametrize(
    ("arguments", "reason", "says"),
    [
        ({"on_unsupported": "ignore"}, "invalid_argument", "'keep'"),
        ({"hashing": 5}, "invalid_argument", "HashConfig"),
        ({"hashing": {"t3": HashConfig()}}, "unknown_table", "t1"),
        ({"hashing": {"t1_": HashConfig()}}, "unknown_table", "no collection has (did you mean 't1'?)"),
        ({"id_ranges": {"f1_": (0, 1)}}, "unknown_feature", "reads (did you mean 'f1'?)"),
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


@pytest.mark.parametrize(
    "hashing",
    [HashConfig(dense_rows=0), HashConfig(rows=30), {"t1": HashConfig(dense_rows=0)}, {"t2": HashConfig(dense_rows=0)}],
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


# Batches: tests/runtime/test_batch_checks.py has all that may be wrong with them; here, also what Python calls it


def assert_refuses(
    model: nn.Module, features: KeyedJaggedTensor, error: type[Exception], reason: str, *says: str
) -> None:
    with refused(reason, "ebc", error=error) as raised:
        model(features)
    assert isinstance(raised.value, InputError)
    assert all(words in str(raised.value) for words in says)
    model(batch(4))  # the next batch is served


@pytest.mark.parametrize("bad", [20, 2**40, -1, -(2**63)])
@pytest.mark.parametrize("position", [0, 4], ids=["first_table", "second_table"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_id_beyond_an_adopted_table_is_named_with_the_way_out(bad: int, position: int, training: bool) -> None:
    values = torch.tensor([1, 2, 3, 4, 5, 6])
    values[position] = bad
    features = KeyedJaggedTensor(["f1", "f2", "f3"], values, lengths=torch.tensor([2, 0, 1, 1, 1, 1]))
    says = ("'f1'", "'t1'") if position == 0 else ("'f3'", "'t2'")
    model = convert(Tower()).train(training)
    assert_refuses(model, features, IndexError, "id_out_of_range", str(bad), *says, "raw_ids()")
