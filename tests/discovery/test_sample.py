"""A sample that does not fit the model is an error, not a check that was quietly left out."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor

import recfx
from recfx.models.sample import Sample, first, without_ids
from tests.builders.batches import one_bag
from tests.builders.collections import one_table
from tests.support.refusals import refused


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()
        self.over = nn.Linear(6, 1)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(torch.cat([dense, self.ebc(features).values()], dim=1))


DENSE = torch.rand(1, 2)


@pytest.mark.parametrize("whole_graph", [False, True])
def test_a_sample_that_lacks_an_argument(whole_graph: bool) -> None:
    with refused("sample_failed", match="features"):
        recfx.convert(Model(), (DENSE,), whole_graph=whole_graph)
    with refused("sample_failed"):
        recfx.trace(Model(), (DENSE,))


def test_raw_ids_without_hashing_are_named_with_the_way_out(tmp_path: Path) -> None:
    sample = (DENSE, one_bag(7_000_000_000))
    ways = (
        lambda: recfx.convert(Model(), sample),
        lambda: recfx.trace(Model(), sample),
        lambda: recfx.export(Model(), tmp_path / "model.pt", sample),
    )
    for way in ways:
        with refused("sample_failed", match="id 7000000000 ", error=recfx.RecfxError) as raised:
            way()
        assert str(raised.value).count("What to do:") == 1
        assert "HashConfig.raw_ids()" in raised.value.what_to_do
    recfx.convert(Model(), (DENSE, one_bag(7_000_000_000)), hashing=recfx.HashConfig(dense_rows=0))


def test_a_sample_that_fills_a_table() -> None:
    with refused("sample_failed", match=r"table_full.*table 't'"):
        recfx.convert(Model(), (DENSE, one_bag(*range(100, 120))), hashing=recfx.HashConfig(dense_rows=0))


def test_a_meta_model_is_converted_and_the_report_says_that_nothing_was_compared() -> None:
    with torch.device("meta"):
        model = Model()
    report = recfx.explain(recfx.convert(model, (DENSE, one_bag(1))))
    assert report.ok
    assert [reason.code for reason in report.reasons] == ["verification_skipped"]


@pytest.mark.parametrize(
    ("device", "what_to_do"),
    [("cuda:99", "'cpu'"), ("npu:0", "install torch_npu"), ("privateuseone:3", "such as 'cpu'")],
)
def test_a_device_that_is_not_there(device: str, what_to_do: str) -> None:
    model = Model()
    with refused("device_unavailable", match=device) as caught:
        recfx.convert(model, device=device)
    assert what_to_do in caught.value.what_to_do
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize(("wrong", "named"), [(torch.tensor([1]), "a Tensor"), (None, "is None"), ([1, 2], "a list")])
def test_a_batch_that_is_no_keyed_jagged_tensor(wrong: object, named: str) -> None:
    converted = recfx.convert(Model())
    with refused("not_a_keyed_jagged_tensor", "ebc", match=named, error=recfx.InputError):
        converted(DENSE, wrong)


def beside_jagged() -> Sample:
    lengths, ids = torch.tensor([2, 0, 3]), torch.arange(5)
    times = JaggedTensor(10 * torch.arange(5.0).unsqueeze(1), lengths=lengths, weights=torch.arange(5.0))
    dense = KeyedTensor(["c", "d"], [1, 2], torch.arange(9.0).view(3, 3))
    return Sample(KeyedJaggedTensor(["f"], ids, lengths=lengths), {"times": times}, dense)


def test_jagged_values_and_dense_features_are_resized_with_the_ids() -> None:
    """Operators of FBGEMM read and write outside of values that are fewer than lengths say."""
    expected = {
        Sample.resized: ([2, 0, 3, 2], [0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 0]),
        first: ([2], [0, 1], [0]),
        without_ids: ([0, 0, 0], [], [0, 1, 2]),
    }
    for method, (lengths, ids, samples) in expected.items():
        features, others, dense = method(beside_jagged()).args
        times = others["times"]
        assert (features.lengths().tolist(), features.values().tolist()) == (lengths, ids)
        assert (times.lengths().tolist(), times.weights().tolist()) == (lengths, ids)
        assert times.values().tolist() == [[10.0 * id_] for id_ in ids]
        assert dense.keys() == ["c", "d"]
        assert torch.equal(dense.values(), torch.arange(9.0).view(3, 3)[samples])


def test_a_failed_batch_counts_nothing() -> None:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name])
        for name, rows in (("a", 50), ("b", 4))
    ]
    converted = recfx.convert(EmbeddingBagCollection(tables), hashing=recfx.HashConfig(dense_rows=0))
    ids = torch.arange(20) + 1000
    with pytest.raises(recfx.TableFullError):
        converted(KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([10, 10])))
    assert converted.index("a").counters == dict.fromkeys(converted.index("a").counters, 0)
    assert len(converted.index("a")) == 0
