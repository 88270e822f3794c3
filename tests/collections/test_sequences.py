"""``HashEmbeddingCollection`` is what ``torchrec.EmbeddingCollection`` is: input, output, state, errors, surface."""

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface

import recfx
from recfx import HashConfig, HashEmbeddingCollection
from tests.builders.batches import bags, batch, one_bag
from tests.builders.collections import sequence_table, sequences
from tests.builders.optimizers import OPTIMIZERS, attach
from tests.models.sequences import sharing
from tests.support.jagged import assert_same
from tests.support.refusals import refused

RAW = HashConfig(dense_rows=0)


def pair(standard: EmbeddingCollection, **options: Any) -> tuple[EmbeddingCollection, HashEmbeddingCollection]:
    """A standard collection and its conversion, which share their weights."""
    converted = recfx.convert(standard, **options)
    assert isinstance(converted, HashEmbeddingCollection)
    return standard, converted


# What goes in and comes out


@pytest.mark.parametrize("hashing", [HashConfig(), None], ids=["adopted", "static"])
@pytest.mark.parametrize("make", [sequences, lambda: sequences(need_indices=True), sharing, lambda: sequences(dim=1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_outputs_are_bit_for_bit_those_of_the_standard_collection(
    hashing: HashConfig | None, make: Any, dtype: torch.dtype
) -> None:
    standard, converted = pair(make(), hashing=hashing)
    for features in (
        batch(5, dtype=dtype),
        batch(5, ["f3", "more", "f2", "f1"], dtype=dtype),  # in another order, and one that no table reads
        batch(5, weighted=True, dtype=dtype),  # weights are ignored
        batch(3, longest=0, dtype=dtype),
        batch(1, dtype=dtype),
    ):
        assert_same(converted(features), standard(features))


def test_keys_are_in_the_order_of_tables_and_then_of_their_features() -> None:
    standard, converted = pair(sharing())
    answer = converted(batch(2))
    assert {type(answer), *map(type, answer.values())} == {dict, JaggedTensor}
    assert list(answer) == list(standard(batch(2))) == ["f3", "f2@b", "f2@a"]  # of two random batches
    assert converted.embedding_names_by_table() == standard.embedding_names_by_table()


@pytest.mark.parametrize("cast", [nn.Module.double, nn.Module.half, nn.Module.bfloat16], ids=lambda cast: cast.__name__)
def test_values_are_float32_whatever_the_tables_are(cast: Any) -> None:
    standard, converted = pair(cast(sequences()))
    features = batch(3)
    assert {value.values().dtype for value in converted(features).values()} == {torch.float32}
    assert_same(converted(features), standard(features))
    standard, converted = pair(sequences())
    assert_same(cast(converted)(features), cast(standard)(features))


@pytest.mark.parametrize("data_type", list(DataType))
def test_tables_have_the_dtype_that_torchrec_gives_them(data_type: DataType) -> None:
    def weight(kind: Any) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = kind([sequence_table("s", ["f"], data_type=data_type)])
            except Exception as error:
                return type(error)
        return made.embeddings["s"].weight.dtype

    assert weight(HashEmbeddingCollection) == weight(EmbeddingCollection)


def test_a_variable_batch_is_not_expanded() -> None:
    """Each key keeps its own samples, as in TorchRec's unsharded collection."""
    features = KeyedJaggedTensor(
        ["f1", "f2", "f3"],
        torch.arange(9),
        lengths=torch.tensor([1, 2, 0, 3, 1, 2]),
        stride_per_key_per_rank=[[3], [1], [2]],
        inverse_indices=(["f1", "f2", "f3"], torch.tensor([[0, 1, 2], [0, 0, 0], [0, 1, 1]])),
    )
    standard, converted = pair(sequences(need_indices=True))
    assert_same(converted(features), standard(features))


def test_a_gradient_is_the_sum_over_the_occurrences_of_an_id() -> None:
    standard, converted = pair(sequences())
    features = bags({"f1": [[3, 3], [3]], "f2": [[1], []], "f3": [[], [1, 2]]})
    gradients = []
    for one in (standard, converted):
        one.zero_grad()
        out = one(features)
        (out["f1"].values() * torch.tensor([[1.0], [2.0], [4.0]]) + out["f2"].values().sum()).sum().backward()
        gradients.append([weight.grad.clone() for weight in one.parameters()])
    assert all(map(torch.equal, *gradients))
    assert gradients[1][0][3].unique().tolist() == [7.0]
    assert gradients[1][0].count_nonzero() == 8


# What it is


def test_what_code_asks_a_collection() -> None:
    flags = [name for name in ("need_indices", "use_gather_select") if hasattr(EmbeddingCollection, name)]
    standard, converted = pair(sequences(**dict.fromkeys(flags, True)))
    assert isinstance(converted, EmbeddingCollectionInterface)
    assert converted.embedding_configs() == standard.embedding_configs()
    for question in ("embedding_dim", "embedding_names_by_table", "need_indices"):
        assert getattr(converted, question)() == getattr(standard, question)(), question
    assert converted.device == standard.device
    assert list(converted.state_dict()) == list(standard.state_dict()) == [
        "embeddings.s1.weight", "embeddings.s2.weight",
    ]  # fmt: skip
    assert [id(weight) for weight in converted.parameters()] == [id(weight) for weight in standard.parameters()]
    plain = recfx.unconvert(converted)
    assert type(plain) is EmbeddingCollection
    assert all(getattr(plain, flag)() for flag in flags)


@pytest.mark.parametrize("kind", [EmbeddingCollection, HashEmbeddingCollection])
def test_what_cannot_be_built(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"dim"):
        kind([sequence_table("a", ["f1"], dim=4), sequence_table("b", ["f2"], dim=8)])
    with pytest.raises(ValueError, match="a"):
        kind([sequence_table("a", ["f1"]), sequence_table("a", ["f2"])])


# Raw ids


def test_every_integer_is_an_id_and_keeps_its_place() -> None:
    made = recfx.convert(sequences(need_indices=True), hashing=RAW)
    ids = [-(2**63), 5, 2**63 - 1, 5, -1]
    features = bags({"f1": [ids[:2], ids[2:]], "f2": [[], [7]], "f3": [[7], []]})
    trained = made.train()(features)
    assert made.index("s1").items()[0].tolist() == [-(2**63), 5, 2**63 - 1, -1]
    assert trained["f1"].weights().tolist() == ids  # not rows
    assert torch.equal(trained["f1"].values()[1], trained["f1"].values()[3])
    assert torch.equal(trained["f2"].values(), trained["f3"].values())
    assert trained["f1"].lengths().tolist() == [2, 3]


@pytest.mark.parametrize("unseen", ["zeros", "share"])
def test_an_id_without_a_row_is_not_dropped(unseen: str) -> None:
    made = recfx.convert(sequences(), hashing=HashConfig(dense_rows=0, unseen=unseen))
    made.train()(bags({"f1": [[10, 11]], "f2": [[]], "f3": [[]]}))
    answer = made.eval()(bags({"f1": [[99, 10], [98], [11]], "f2": [[5], [], []], "f3": [[], [], []]}))
    rows = made.weight("s1")[made.index("s1").find(torch.tensor([10, 11]))]
    assert answer["f1"].lengths().tolist() == [2, 1, 1]
    assert torch.equal(answer["f1"].values()[[1, 3]], rows)
    assert len(made.index("s1")) == 2  # nothing was inserted
    answers = torch.cat([answer["f1"].values()[[0, 2]], answer["f2"].values()])
    assert answers.any() == (unseen == "share")


def test_ids_that_are_not_admitted_read_zeros_and_get_no_gradient() -> None:
    made = HashEmbeddingCollection([sequence_table("t", ["f"], rows=8)])
    made = recfx.convert(recfx.unconvert(made), hashing=HashConfig(dense_rows=0, admit_after=2))
    out = made(one_bag(1, 1, 2))["f"].values()
    assert out[2].eq(0).all()
    assert not out[:2].eq(0).any()
    out.sum().backward()
    row = made.index("t").find(torch.tensor([1]))
    assert made.weight("t").grad.nonzero()[:, 0].unique().tolist() == row.tolist()


@pytest.mark.parametrize("hashing", [HashConfig(), RAW], ids=["adopted", "raw"])
def test_compiled_and_traced(hashing: HashConfig) -> None:
    features = batch(3)
    made = recfx.convert(sequences(), hashing=hashing)
    made(features)
    expected = made.eval()(features)
    torch._dynamo.reset()
    assert_same(torch.compile(made, backend="eager")(features), expected)
    graph = torch.fx.symbolic_trace(made)
    assert_same(graph(features), expected)
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_module"] == ["whole_collection"]


def test_a_tensor_dict_is_taken_as_the_standard_collection_takes_it() -> None:
    standard, converted = pair(sequences(need_indices=True))
    nested = {
        key: torch.nested.nested_tensor_from_jagged(jagged.values(), lengths=jagged.lengths())
        for key, jagged in batch(4).to_dict().items()
    }
    features = TensorDict(nested, batch_size=[])
    assert_same(converted(features), standard(features))


def test_rows_are_touched_if_the_backward_reaches_them_even_with_a_gradient_of_zero() -> None:
    made = EmbeddingCollection([sequence_table("s", ["f"])])
    attach(made, "sgd", weight_decay=0.5)
    converted = recfx.convert(made)
    before = converted.weight("s").detach().clone()
    (converted(one_bag(3))["f"].values() * 0).sum().backward()
    assert (converted.weight("s") - before).any(dim=1).nonzero()[:, 0].tolist() == [3]
    converted(one_bag(4))["f"].values().detach()
    assert torch.equal(converted.weight("s")[4], before[4])


# Tables whose output is not used

USED = [["f1"], ["f1", "f2"], ["f3"], ["f1", "f2", "f3"]]
EVERY_ROW = bags(
    {"f1": [[0, 0], [*range(20)]], "f2": [[*range(20)], [3]], "f3": [[*range(20)], []], "f4": [[7, 7], [2]]}
)
"""Then no dense rule moves rows that were not read. Raw ids get the rows of their numbers."""

each_backend = pytest.mark.parametrize("backend", ["auto", "reference"])


def sequences_with_twin() -> EmbeddingCollection:
    """``sequences()``, and a table of ``f4`` that has the weight of ``s1``."""
    made = EmbeddingCollection([*sequences().embedding_configs(), sequence_table("twin", ["f4"])])
    made.embeddings["twin"].weight = made.embeddings["s1"].weight
    return made


def trained_beside(
    kind: Any, hashing: HashConfig, backend: str, build: Any = sequences, **settings: Any
) -> list[nn.Module]:
    """A standard collection and its conversion, with equal weights, and with the optimizer in backward, if any."""
    models = [build() for _ in range(2)]
    for model in models if kind else []:
        attach(model, kind, **settings)
    models[1] = recfx.convert(models[1], hashing=hashing, backend=backend)
    models[1](EVERY_ROW)
    models[0].load_state_dict({name: value for name, value in models[1].state_dict().items() if "weight" in name})
    return models


def train(model: nn.Module, used: list[str], calls: int) -> None:
    """One backward through the outputs of ``used`` keys: of all of them in the first call, of fewer in the second."""
    outputs = [model(EVERY_ROW) for _ in range(calls)]
    losses = [
        (outputs[number][key].values() * torch.linspace(-1, 1, 8) * (number + 1)).sum()
        for number in range(calls)
        for key in used[number % len(used) :]
    ]
    torch.stack(losses).sum().backward()


@each_backend
@pytest.mark.parametrize("hashing", [HashConfig(), RAW], ids=["adopted", "raw"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("dense", [torch.optim.AdamW, torch.optim.SGD])
def test_tables_whose_outputs_are_not_used_have_no_gradient(
    backend: str, hashing: HashConfig, calls: int, dense: Any
) -> None:
    models = trained_beside(None, hashing, backend)
    settings = {"momentum": 0.9} if dense is torch.optim.SGD else {}
    optimizers = [dense(model.parameters(), lr=0.1, weight_decay=0.5, **settings) for model in models]
    for used in USED:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            train(model, used, calls)
            optimizer.step()
        for expected, parameter in zip(*(model.parameters() for model in models), strict=True):
            assert (expected.grad is None) == (parameter.grad is None), used
            torch.testing.assert_close(parameter, expected)


@each_backend
@pytest.mark.parametrize("kind", [None, "adagrad"])
@pytest.mark.parametrize("used", USED)
def test_hooks_are_called_for_used_outputs_and_their_tables_alone(
    backend: str, kind: str | None, used: list[str]
) -> None:
    called: list[dict[str, torch.Tensor]] = []
    for model in trained_beside(kind, HashConfig(), backend):
        seen: dict[str, torch.Tensor] = {}
        called.append(seen)
        if kind is None:
            for name, weight in model.named_parameters():
                weight.register_hook(lambda given, seen=seen, name=name: seen.update({name: given.clone()}))
        rows = {key: value.values() for key, value in model(EVERY_ROW).items()}
        for key, values in rows.items():
            values.register_hook(lambda given, seen=seen, key=key: seen.update({key: given.clone()}))
        torch.stack([rows[key].mul_(2).sum() for key in used]).sum().backward()
    standard, converted = called
    assert standard.keys() == converted.keys()
    for name, gradient in standard.items():
        assert torch.equal(converted[name], gradient)


@each_backend
@pytest.mark.parametrize("kind", [None, "adagrad"])
@pytest.mark.parametrize("frozen", ["s1", "s2"])
def test_outputs_of_frozen_tables_take_no_gradient(backend: str, kind: str | None, frozen: str) -> None:
    take = []
    models = trained_beside(kind, HashConfig(), backend)
    for model in models:
        model.embeddings[frozen].weight.requires_grad_(False)
        rows = {key: value.values() for key, value in model(EVERY_ROW).items()}
        take.append([key for key, values in rows.items() if values.requires_grad])
        torch.stack([(rows[key] ** 2).sum() for key in take[-1]]).sum().backward()
    assert take[0] == take[1]
    assert len(take[0]) in (1, 2)
    for expected, parameter in zip(*(model.parameters() for model in models), strict=True):
        assert (expected.grad is None) == (parameter.grad is None)
        torch.testing.assert_close(parameter, expected)


@each_backend
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("build", "hashing"),
    [(sequences, HashConfig()), (sequences, RAW), (sequences_with_twin, HashConfig())],
    ids=["adopted", "raw", "twin"],
)
def test_optimizers_in_backward_leave_tables_alone_whose_outputs_are_not_used(
    backend: str, hashing: HashConfig, calls: int, kind: str, build: Any
) -> None:
    settings = {} if kind == "rowwise_adagrad" else {"weight_decay": 0.5}
    standard, converted = trained_beside(kind, hashing, backend, build, **settings)
    for used in USED:
        before = converted.weight("s2").detach().clone()
        for model in (standard, converted):
            train(model, used, calls)
        for expected, parameter in zip(standard.parameters(), converted.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(before, converted.weight("s2")) == (used == ["f1"])


@each_backend
@pytest.mark.parametrize("key", ["f1", "f2", "f3"])
def test_a_backward_through_any_key_is_refused_once_ids_were_removed(backend: str, key: str) -> None:
    converted = recfx.convert(sequences(), hashing=RAW, backend=backend)
    values = converted(EVERY_ROW)[key].values()
    converted.index("s2").erase(torch.tensor([1]))
    with refused("backward_after_removal", error=recfx.InputError):
        values.sum().backward()


@pytest.mark.parametrize("hashing", [HashConfig(), RAW])
def test_shapes_on_meta_follow_the_lengths_that_the_batch_states(hashing: HashConfig) -> None:
    made = sequences()
    features = KeyedJaggedTensor(
        ["f3", "f1", "f2"],
        torch.empty(6, dtype=torch.int64, device="meta"),
        lengths=torch.empty(3, dtype=torch.int64, device="meta"),
        length_per_key=[1, 3, 2],
    )
    converted = recfx.convert(made, hashing=hashing).to("meta")
    shapes = {key: jagged.values().shape for key, jagged in converted(features).items()}
    assert shapes == {key: jagged.values().shape for key, jagged in made.to("meta")(features).items()}
    assert shapes["f1"][0] == 3
