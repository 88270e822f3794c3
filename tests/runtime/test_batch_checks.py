"""Batches that do not fit: what is said of each, that nothing has changed then, and what is taken all the same."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from recfx.runtime.select_features import SelectFeatures
from tests.builders.batches import one_bag
from tests.builders.collections import one_table
from tests.builders.optimizers import attach
from tests.support.refusals import refused

HASHINGS = {"adopted": recfx.HashConfig(), "static": None, "hashed": recfx.HashConfig(dense_rows=0)}
each_hashing = pytest.mark.parametrize("hashing", HASHINGS.values(), ids=HASHINGS.keys())


def standard(*, is_weighted: bool = False, device: str | None = None) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name="t1", num_embeddings=20, embedding_dim=4, feature_names=["a"]),
            EmbeddingBagConfig(name="t2", num_embeddings=20, embedding_dim=8, feature_names=["b", "a"]),
        ],
        is_weighted=is_weighted,
        device=device,
    )


def converted(hashing: recfx.HashConfig | None, **options: Any) -> nn.Module:
    return recfx.convert(standard(**options), hashing=hashing)


def batch(values: Any = None, weights: Any = None, **more: Any) -> KeyedJaggedTensor:
    """Two keys, two samples, six ids."""
    values = torch.arange(6) if values is None else values
    if "lengths" not in more and "offsets" not in more:
        more["lengths"] = torch.tensor([2, 1, 1, 2])
    return KeyedJaggedTensor(["a", "b"], values, weights, **more)


WRONG_LENGTHS: dict[str, tuple[dict[str, Any], str]] = {
    "far_apart": ({"lengths": torch.tensor([2**40, 1 - 2**40, 1, 4])}, "a bag has length -1099511627775,"),
    "too_few": ({"lengths": torch.tensor([2, 1, 1, 1])}, "lengths add up to 5, and there are 6 ids"),
    "too_many": ({"lengths": torch.tensor([2, 1, 1, 3])}, "lengths add up to 7,"),
    "negative": ({"lengths": torch.tensor([3, -1, 2, 2])}, "a bag has length -1,"),
    "wrap_around": (
        {"lengths": torch.tensor([2**62, 2**62, 2**62, 2**62 + 6])},
        "lengths add up to 18446744073709551622,",
    ),
    "wrap_around_int32": (
        {"lengths": torch.tensor([2**31 - 1, 2**31 - 1, 2, 6], dtype=torch.int32)},
        "lengths add up to 4294967302,",
    ),
    "another_number": ({"lengths": torch.tensor([2, 1, 1, 1, 1])}, "there are 5 lengths, but 2 keys with 2 bags each"),
    "another_batch_size": (
        {"lengths": torch.tensor([2, 1, 1, 2]), "stride": 3},
        "there are 4 lengths, but 2 keys with 3 bags each",
    ),
    "descend": ({"offsets": torch.tensor([0, 3, 2, 4, 6])}, "offsets go down from 3 to 2,"),
    "end_early": ({"offsets": torch.tensor([0, 2, 3, 4, 5])}, "lengths add up to 5,"),
    "begin_late": ({"offsets": torch.tensor([1, 2, 3, 4, 6])}, "lengths add up to 5,"),
}


@each_hashing
@pytest.mark.parametrize(("wrong", "message"), WRONG_LENGTHS.values(), ids=WRONG_LENGTHS.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_lengths_that_do_not_fit(
    hashing: recfx.HashConfig | None, wrong: dict[str, Any], message: str, training: bool
) -> None:
    model = converted(hashing).train(training)
    before = copy.deepcopy(model.state_dict())
    with refused("bad_lengths", match=message, error=recfx.InputError):
        model(batch(**wrong))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model(batch())


IDS, WEIGHTS, INVERSE = torch.arange(6), torch.rand(6), torch.tensor([[0, 1, 1], [0, 0, 1]])
OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "2-d ids": ({"values": IDS.view(6, 1)}, "bad_ids", "a tensor of 2 dimensions"),
    "sparse ids": ({"values": IDS.to_sparse()}, "bad_ids", "torch.sparse_coo"),
    "no ids": ({"values": IDS.tolist()}, "bad_ids", "a list"),
    "uint16 ids": ({"values": IDS.to(torch.uint16)}, "wrong_id_dtype", "torch.uint16"),
    "no weights": ({"weights": None}, "missing_weights", "the batch has no weights"),
    "sparse weights": ({"weights": WEIGHTS.to_sparse()}, "bad_weights", "weights are a torch.sparse_coo tensor"),
    "listed weights": ({"weights": WEIGHTS.tolist()}, "bad_weights", "weights are a list"),
    "one weight": ({"weights": torch.tensor(1.0)}, "bad_weights", r"have shape \[\]"),
    "neither": ({"lengths": None}, "bad_lengths", "lengths are missing, and so are offsets"),
    "sparse lengths": ({"lengths": torch.tensor([2, 1, 1, 2]).to_sparse()}, "bad_lengths", "lengths are a torch.sp"),
    "sparse offsets": ({"offsets": torch.tensor([0, 2, 3, 4, 6]).to_sparse()}, "bad_lengths", "offsets are a torch"),
    "offsets on meta": ({"offsets": torch.arange(5, device="meta")}, "several_devices", "offsets are on device meta"),
    "no offsets": ({"offsets": torch.tensor([], dtype=torch.int64)}, "bad_lengths", "offsets are empty"),
    "one offset": ({"offsets": torch.tensor(0)}, "bad_lengths", "offsets are a tensor of 0 dimensions"),
    "short weights": ({"weights": WEIGHTS[:5]}, "bad_weights", r"have shape \[5\], but there are 6 ids"),
    "2-d weights": ({"weights": WEIGHTS.view(6, 1)}, "bad_weights", r"\[6, 1\]"),
    "bool weights": ({"weights": WEIGHTS > 0}, "bad_weights", "torch.bool"),
    "complex weights": ({"weights": WEIGHTS.to(torch.complex64)}, "bad_weights", "torch.complex64"),
    "weights on meta": ({"weights": WEIGHTS.to("meta")}, "several_devices", "weights are on device meta"),
    "lengths on meta": ({"lengths": torch.ones(4, device="meta").int()}, "several_devices", "lengths are on device"),
    "ids on meta": ({"values": IDS.to("meta")}, "several_devices", "meta"),
    "other names": ({"inverse_indices": (["a", "c"], INVERSE)}, "bad_inverse_indices", "feature 'b'"),
    "bags that are not there": ({"inverse_indices": (["a", "b"], INVERSE + 1)}, "bad_inverse_indices", "index 2"),
    "flat inverse": ({"inverse_indices": (["a", "b"], INVERSE.view(-1))}, "bad_inverse_indices", r"\[6\]"),
    "inverse of one": ({"inverse_indices": (["a", "b"], INVERSE[:1])}, "bad_inverse_indices", "for 1 features"),
    "inverse on meta": ({"inverse_indices": (["a", "b"], INVERSE.to("meta"))}, "several_devices", "inverse_indices"),
    "batch sizes": ({"stride_per_key_per_rank": [[2], [3]]}, "bad_batch_sizes", r"\[2, 3\]"),
    "flat batch sizes": ({"stride_per_key_per_rank": torch.tensor([2, 2])}, "bad_batch_sizes", "cannot be read"),
}  # fmt: skip


@each_hashing
@pytest.mark.parametrize(("wrong", "reason", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_what_else_does_not_fit(
    hashing: recfx.HashConfig | None, wrong: dict[str, Any], reason: str, message: str
) -> None:
    model = recfx.convert(nn.ModuleDict({"ebc": standard(is_weighted=True)}), hashing=hashing)
    before = copy.deepcopy(model.state_dict())
    arguments = {"weights": WEIGHTS, **wrong}
    with refused(reason, "ebc", match=message, error=recfx.RecfxError) as caught:
        model["ebc"](batch(**arguments))
    assert caught.value.what_to_do
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_lengths_of_a_type_that_torchrec_lets_through_while_it_compiles() -> None:
    features = one_bag(1, 2)
    features._lengths = torch.tensor([2.0])
    with refused("bad_lengths", match=r"lengths are torch\.float32", error=recfx.InputError):
        recfx.convert(one_table())(features)


@pytest.mark.parametrize("weighted", [False, True])
def test_of_a_batch_on_meta_sizes_alone_are_checked(weighted: bool) -> None:
    checks = SelectFeatures("ebc", recfx.convert(standard()).tables, weighted)
    order = checks._order_of(["a", "b"])
    for form in ({"lengths": torch.tensor([2, 1, 1, 2])}, {"offsets": torch.tensor([0, 2, 3, 4, 6])}):
        features = batch(weights=WEIGHTS, **form).to(torch.device("meta"))
        checked = checks.checked(features, order)
        assert (checked.lengths().shape, checked.offsets().shape, checked.offsets().dtype) == ((4,), (5,), torch.int64)
        assert (checked.values().is_meta, checked.lengths().is_meta, checked.offsets().is_meta) == (True, True, True)
        assert (checked.keys(), checked.stride()) == (["a", "b"], 2)
        assert (checked.weights_or_none() is not None) == weighted


LENGTHS, OFFSETS = torch.tensor([2, 1, 1, 2]), torch.tensor([0, 2, 3, 4, 6])
SMALL = [torch.int8, torch.uint8, torch.int16, torch.int32]
TAKEN: dict[str, dict[str, Any]] = {
    **{f"lengths {dtype}": {"lengths": LENGTHS.to(dtype)} for dtype in SMALL},
    **{f"offsets {dtype}": {"offsets": OFFSETS.to(dtype)} for dtype in SMALL},
    **{f"ids {dtype}": {"values": IDS.to(dtype)} for dtype in [*SMALL, torch.bool]},
    "offsets from 5 on": {"offsets": OFFSETS + 5},
    "lengths as a matrix": {"lengths": LENGTHS.view(2, 2)},
    "lengths and other offsets": {"lengths": LENGTHS, "offsets": torch.tensor([0, 1, 3, 4, 6])},
    "every other id": {"values": torch.arange(12)[::2]},
    "equal batch sizes": {"stride_per_key_per_rank": [[2], [2]]},
    "no inverse indices": {"inverse_indices": (["a", "b"], INVERSE[:, :0])},
    "empty inverse indices": {"inverse_indices": (["a", "b"], torch.empty(2, 0))},
    "unused weights": {"weights": torch.rand(6, 3)},
}


@pytest.mark.parametrize("hashing", [recfx.HashConfig(), None], ids=["adopted", "static"])
@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
def test_what_the_standard_collection_takes(hashing: recfx.HashConfig | None, taken: dict[str, Any]) -> None:
    oracle, model = standard(), converted(hashing)
    for collection in (oracle, model):
        (collection(batch(**taken)).values() ** 2).sum().backward()
    torch.testing.assert_close(model(batch(**taken)).values(), oracle(batch(**taken)).values())
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_more_ids_than_a_small_length_can_count() -> None:
    """The standard collection adds lengths up in their own type."""
    lengths = torch.full((4,), 100, dtype=torch.uint8)
    answer = converted(recfx.HashConfig())(batch(torch.zeros(400, dtype=torch.int64), lengths=lengths))
    expected = standard()(batch(torch.zeros(400, dtype=torch.int64), lengths=lengths.long()))
    torch.testing.assert_close(answer.values(), expected.values())


# Shapes alone


@each_hashing
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
@pytest.mark.parametrize("permuted", [False, True])
def test_meta(hashing: recfx.HashConfig | None, optimizer: Any, permuted: bool) -> None:
    """Tables on meta, and a batch on meta or on the CPU."""
    answers = []
    for is_ours in (False, True):
        model: nn.Module = standard(device="meta")
        if optimizer is not None:
            attach(model, optimizer)
        model = recfx.convert(model, hashing=hashing) if is_ours else model
        for device in ("meta", "cpu"):
            keys = ["b", "x", "a"] if permuted else ["a", "b"]
            features = KeyedJaggedTensor(
                keys, torch.arange(3 * len(keys)), lengths=torch.tensor([2, 1] * len(keys))
            ).to(torch.device(device))
            pooled = model(features)
            pooled.values().sum().backward()
            gradients = [None if parameter.grad is None else parameter.grad.device for parameter in model.parameters()]
            answers.append((pooled.keys(), pooled.values().shape, pooled.values().device, gradients))
    assert answers[:2] == answers[2:]


# torch.func


@each_hashing
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["grad", "vjp"])
def test_torch_func(hashing: recfx.HashConfig | None, fused: bool, how: str) -> None:
    """Gradients are results: no optimizer in backward makes a step of them."""

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return (torch.func.functional_call(model, parameters, (batch(),)).values() ** 2).sum()

        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        if how == "grad":
            return torch.func.grad(loss)(parameters)
        value, backward = torch.func.vjp(loss, parameters)
        return backward(torch.ones_like(value))[0]

    plain = standard()
    if fused:
        attach(plain, torch.optim.SGD)
    model = recfx.convert(plain, hashing=hashing)
    actual = gradients(model)
    before = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(gradients(model), actual)
    torch.testing.assert_close(
        {name: model.state_dict()[name] for name in actual}, {name: before[name] for name in actual}
    )
    dense = recfx.convert(standard(), hashing=hashing)
    (dense(batch()).values() ** 2).sum().backward()
    expected = {name: parameter.grad for name, parameter in dense.named_parameters()}
    if hashing is None or hashing.dense_rows is None:
        expected = gradients(standard())
    torch.testing.assert_close(actual, expected)


@each_hashing
def test_torch_func_of_the_batch_weights(hashing: recfx.HashConfig | None) -> None:
    model = converted(hashing, is_weighted=True)
    model(batch(weights=WEIGHTS))  # gives rows
    gradient = torch.func.grad(lambda weights: (model(batch(weights=weights)).values() ** 2).sum())(WEIGHTS)
    weights = WEIGHTS.clone().requires_grad_()
    (model(batch(weights=weights)).values() ** 2).sum().backward()
    torch.testing.assert_close(gradient, weights.grad)


@pytest.mark.parametrize(
    ("rows", "dim", "dtype", "optimizer"),
    [(2**31, 1, torch.float16, torch.optim.SGD), (2**24 + 8, 64, torch.float32, RowWiseAdagrad)],
)
def test_the_last_rows_of_a_huge_table_are_trained(rows: int, dim: int, dtype: torch.dtype, optimizer: Any) -> None:
    """The table has 4 GiB; only the rows that are used are ever in memory, so its optimizer is attached before."""
    plain = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])], device="meta"
    )
    weight = nn.Parameter(torch.empty(1, dim, dtype=dtype))
    plain.embedding_bags["t"].weight = weight
    attach(plain, optimizer, lr=0.5)
    weight.data = torch.empty(rows, dim, dtype=dtype)
    state = weight._in_backward_optimizers[0].state[weight]
    for name, value in state.items():
        if value.shape[:1] == (1,):
            state[name] = value.expand(rows, *value.shape[1:]).contiguous()
    ids = torch.tensor([0, 5, rows - 1])
    with torch.no_grad():
        weight[ids] = 1.0
    model = recfx.convert(plain)
    model(KeyedJaggedTensor(["f"], ids[1:], lengths=torch.tensor([1, 1]))).values().sum().backward()
    torch.testing.assert_close(weight[ids, 0].float(), torch.tensor([1.0, 0.5, 0.5]))
