"""Tables that evict, stepped by ordinary optimizers: whoever gets a row starts anew in them.

The oracle is a standard collection in which every owner of a row has a row of its own, and torch's own optimizer.
"""

import copy
import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop, SparseAdam
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from recfx.errors import TableFullError
from recfx.hashing import HashConfig
from tests.builders.batches import bags
from tests.builders.collections import one_table, table
from tests.builders.optimizers import attach
from tests.support.pairwise import pairwise
from tests.support.refusals import refused

EVICTS = HashConfig.raw_ids(on_full="evict")
HALF = partial(Adagrad, lr=0.5, initial_accumulator_value=0.25)  # the sum of a row is 0.25, and 1 more for each step
Parameters = Iterable[nn.Parameter]


class OwnStep(torch.optim.Optimizer):
    """A class of the user's, whose state begins with ones; after ``later`` steps, it has a second one."""

    def __init__(self, params: Parameters, lr: float = 0.1, later: int = 1000) -> None:
        super().__init__(params, {"lr": lr, "later": later})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.steps += 1
        (group,) = self.param_groups
        for weight in group["params"]:
            state = self.state[weight]
            state["square"] = state.get("square", torch.ones_like(weight)) + weight.grad**2
            weight -= group["lr"] * weight.grad / state["square"]
            if self.steps > group["later"]:
                state["average"] = weight.mean(0)


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": partial(Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "rowwise_adagrad": partial(RowWiseAdagrad, lr=0.1),
    "adam": partial(Adam, lr=0.1, amsgrad=True),
    "fused_adam": partial(Adam, lr=0.1, fused=True),
    "rmsprop": partial(RMSprop, lr=0.1, centered=True, momentum=0.5),
    "adadelta": Adadelta,
    "adamax": partial(Adamax, lr=0.1),
    "nadam": partial(NAdam, lr=0.1),
    "radam": partial(RAdam, lr=0.1),
    "rprop": partial(Rprop, lr=0.1),
    "own": OwnStep,
}


def standard(rows: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[table("t", ["f"], dim=4, rows=rows)])


def converted(rows: int = 4, hashing: HashConfig = EVICTS) -> Any:
    return recfx.convert(standard(rows), hashing=hashing)


def features(*ids: int, length: int = 1) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.full((len(ids) // length,), length))


def learn(model: Any, optimizer: torch.optim.Optimizer, *batches: tuple[int, ...]) -> None:
    for ids in batches:
        optimizer.zero_grad()
        model(features(*ids)).values().sum().backward()
        optimizer.step()


def state_of(model: Any, optimizer: Any, id_: int, name: str = "sum") -> float:
    state: Tensor = optimizer.state[model.weight("t")][name][model.index("t").find(torch.tensor([id_]))]
    return float(state[0, 0])


@pairwise(name=OPTIMIZERS, how=["step", "two forwards", "closure"], evict=["lru", "lfu"])
def test_each_owner_of_a_row_is_trained_as_if_the_row_had_been_its_own(name: str, how: str, evict: Any) -> None:
    model, oracle = converted(12, HashConfig.raw_ids(on_full="evict", evict=evict)), standard(1000)
    ours, theirs = (OPTIMIZERS[name](module.parameters()) for module in (model, oracle))
    generator = torch.Generator().manual_seed(1)
    row_of: dict[int, int] = {}  # in the oracle, of the present owners
    weight, its_weight, used, evicted = model.weight("t"), oracle.embedding_bags["t"].weight, 0, 0

    def owners() -> dict[int, int]:
        return dict(zip(*(part.tolist() for part in model.index("t").items()), strict=True))

    def forward_and_backward() -> None:
        nonlocal used, evicted
        ids = torch.randint(0, 30, (6,), generator=generator).tolist()
        output = model(features(*ids, length=2)).values()
        rows = owners()
        evicted += len(row_of.keys() - rows.keys())
        for id_ in row_of.keys() - rows.keys():
            del row_of[id_]
        for id_ in rows.keys() - row_of.keys():
            row_of[id_] = used
            its_weight.data[used] = weight.data[rows[id_]]
            used += 1
        expected = oracle(features(*(row_of[id_] for id_ in ids), length=2)).values()
        torch.testing.assert_close(output, expected)
        gradient = torch.randn(output.shape, generator=generator)
        output.backward(gradient)
        expected.backward(gradient)

    for _ in range(20):
        if how == "closure":
            ours.step(forward_and_backward)  # type: ignore[arg-type]
        else:
            for _ in range(1 + (how == "two forwards")):
                forward_and_backward()
            ours.step()
        theirs.step()
        for id_, row in owners().items():
            torch.testing.assert_close(weight[row], its_weight[row_of[id_]])
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
    assert evicted > 40


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Adafactor, "'col_var'"),
        (SparseAdam, "cannot be made anew"),
        (LBFGS, "cannot be made anew"),
        (partial(OwnStep, later=0), "'average'"),
    ],
)
def test_other_states_are_refused_before_the_first_step(make: Any, why: str) -> None:
    model = recfx.convert(nn.ModuleDict({"ebc": standard(4)}), hashing=EVICTS)["ebc"]
    optimizer = make(model.parameters())
    before = model.weight("t").detach().clone()
    model(features(1, 2)).values().sum().backward()
    initial = model.weight("t").detach().clone()
    with refused("evict_needs_fused_optimizer", "ebc", match=why):
        optimizer.step(lambda: 0.0)
    assert torch.equal(model.weight("t"), initial)
    assert not torch.equal(before, initial)  # the rows of the new ids


def test_any_optimizer_may_list_a_frozen_table() -> None:
    model = converted()
    model.weight("t").requires_grad_(False)
    Adafactor(model.parameters()).step()


def test_a_state_that_comes_later_is_refused_when_it_has_come() -> None:
    model = converted()
    optimizer = OwnStep(model.parameters(), later=1)
    learn(model, optimizer, (1,), (2,))
    with refused("evict_needs_fused_optimizer", match="'average'"):
        learn(model, optimizer, (3,))


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_that_has_loaded_its_state_is_known_from_its_first_step_on(closure: bool) -> None:
    model = converted()
    optimizer = HALF(model.parameters())
    learn(model, optimizer, (1, 2, 3, 4), (1, 2, 3))
    resumed = converted()
    other = HALF(resumed.parameters())
    with torch.no_grad():
        resumed(features(7, 8, 9, 10))  # the state that is loaded now is of other ids than these
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if closure:
        other.step(lambda: resumed(features(5, 1)).values().sum().backward())
    else:
        learn(resumed, other, (5, 1))
    assert [state_of(resumed, other, id_) for id_ in (1, 2, 5)] == [3.25, 2.25, 1.25]


def pickled(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copies_of_a_model_and_its_optimizer(duplicate: Any) -> None:
    model = converted()
    optimizer = HALF(model.parameters())
    learn(model, optimizer, (1, 2, 3, 4))
    other, its_optimizer = duplicate((model, optimizer))
    learn(other, its_optimizer, (5,))
    assert state_of(other, its_optimizer, 5) == 1.25
    assert [state_of(model, optimizer, id_) for id_ in (1, 2, 3, 4)] == [1.25] * 4


def load(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def write(optimizer: Any, state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        optimizer.state[optimizer.param_groups[0]["params"][0]][name].copy_(tensor)


@pytest.mark.parametrize("how", ["load_state_dict", "in place", "closure"])
def test_a_state_that_is_loaded_between_a_forward_and_its_step(how: str) -> None:
    model = converted()
    optimizer = HALF(model.parameters())
    learn(model, optimizer, (1, 2, 3, 4), (1, 2, 3))
    saved = copy.deepcopy(optimizer.state_dict())

    def forward_and_load() -> None:
        optimizer.zero_grad()
        output = model(features(5)).values().sum()
        if how == "in place":  # as KeyedOptimizer loads
            write(optimizer, saved["state"][0])
        else:
            optimizer.load_state_dict(saved)
        output.backward()

    if how == "closure":
        with torch.no_grad():
            model(features(5))
        optimizer.load_state_dict(saved)
        optimizer.step(lambda: model(features(6)).values().sum().backward())
        assert state_of(model, optimizer, 6) == 1.25
        learn(model, optimizer, (5, 6))
        assert [state_of(model, optimizer, id_) for id_ in (5, 6)] == [1.25, 2.25]
        return
    forward_and_load()
    optimizer.step()
    assert [state_of(model, optimizer, id_) for id_ in (1, 2, 3, 5)] == [2.25, 2.25, 2.25, 1.25]


def with_loaded_state() -> tuple[Any, Any]:
    """Rows of 1, 2, 3 and 4, and an optimizer with a state of these that has not stepped yet."""
    model = converted()
    optimizer, resumed = HALF(model.parameters()), HALF(model.parameters())
    learn(model, optimizer, (1, 2, 3, 4), (1, 2, 3))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, resumed


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copies_between_a_forward_and_the_first_step(duplicate: Any) -> None:
    model, optimizer = with_loaded_state()
    with torch.no_grad():
        model(features(5))
    for its_model, its_optimizer in (duplicate((model, optimizer)), (model, optimizer)):
        learn(its_model, its_optimizer, (1,))
        assert [state_of(its_model, its_optimizer, id_) for id_ in (1, 2, 5)] == [3.25, 2.25, 0.25]


def test_a_state_of_unknown_age_is_refused() -> None:
    model, rarely = with_loaded_state()
    often, fresh = HALF(model.parameters()), HALF(model.parameters())
    learn(model, often, (1, 2, 3), (5,))
    fresh.step()  # its state begins with the same number everywhere
    before = copy.deepcopy((model.state_dict(), rarely.state_dict()))
    with refused("evict_needs_fused_optimizer", match="delete that one"):
        rarely.step()
    torch.testing.assert_close((model.state_dict(), rarely.state_dict()), before, rtol=0, atol=0)
    del often, fresh
    rarely.step()


def test_momentum_that_is_switched_on_later() -> None:
    model = converted()
    optimizer = SGD(model.parameters(), lr=0.1)
    learn(model, optimizer, (1, 2, 3, 4))
    optimizer.param_groups[0]["momentum"] = 0.5
    learn(model, optimizer, (1, 2, 3), (5,))
    assert [state_of(model, optimizer, id_, "momentum_buffer") for id_ in (1, 5)] == [0.5, 1.0]
    model(features(6))
    assert state_of(model, optimizer, 6, "momentum_buffer") == 0


@pytest.mark.parametrize("kinds", [[RMSprop], [Adagrad, SGD]])
def test_optimizers_in_backward_that_have_no_fused_form(kinds: list[type]) -> None:
    model = converted()
    for kind in kinds:
        attach(model, kind)
    for ids in ((1, 2, 3, 4), (1, 2, 3)):
        model(features(*ids)).values().sum().backward()
    model(features(5))
    name = "square_avg" if RMSprop in kinds else "sum"
    assert state_of(model, model.weight("t")._in_backward_optimizers[0], 5, name) == 0


class TwoCollections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = standard(4), standard(4)

    def forward(self, first: KeyedJaggedTensor, second: KeyedJaggedTensor) -> Tensor:
        return self.first(first).values() + self.second(second).values()


def test_rows_that_a_batch_leaves_that_another_collection_refuses_start_anew() -> None:
    model: Any = recfx.convert(TwoCollections(), (features(1), features(1)), hashing=EVICTS)
    optimizer = HALF(model.parameters())
    for ids in ((1, 2, 3, 4), (1, 2, 3)):
        model(features(*ids), features(*ids)).sum().backward()
        optimizer.step()
    weight = model.second.weight("t")
    unchanged = model.second.state_dict(), optimizer.state[weight], weight.grad
    before = copy.deepcopy(unchanged)
    with refused("table_full", error=TableFullError):
        model(features(5, 6), features(*range(10, 20)))
    torch.testing.assert_close(unchanged, before, rtol=0, atol=0)
    assert [state_of(model.first, optimizer, id_) for id_ in (5, 6)] == [0.25, 0.25]
    assert not model.first.weight("t").grad[model.first.index("t").find(torch.tensor([5, 6]))].any()


def test_rows_of_erased_ids_start_anew_as_well() -> None:
    """In a table that does not evict, any optimizer will do until then."""
    for make, expected in ((HALF, 1.25), (Adafactor, None)):
        model = converted(hashing=HashConfig.raw_ids())
        optimizer = make(model.parameters())
        learn(model, optimizer, (1, 2), (1, 3))
        model.index("t").erase(torch.tensor([1]))
        if expected is None:
            with refused("evict_needs_fused_optimizer", match="'col_var'"):
                learn(model, optimizer, (9,))
        else:
            learn(model, optimizer, (9,))
            assert state_of(model, optimizer, 9) == expected


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", ["adam", "adagrad", "momentum", "rmsprop"])
def test_weight_decay_of_a_row_that_no_id_had_is_not_in_the_state_of_its_first(name: str, resumed: bool) -> None:
    """Torch's optimizers decay all rows of a table, and none is evicted here."""
    model, make = converted(hashing=HashConfig.raw_ids()), partial(OPTIMIZERS[name], weight_decay=0.5)
    optimizer: Any = make(model.parameters())
    learn(model, optimizer, (1,), (1,))
    if resumed:
        saved, optimizer = copy.deepcopy(optimizer.state_dict()), make(model.parameters())
        optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    output = model(features(1, 7)).values()
    row = int(model.index("t").find(torch.tensor([7])))
    oracle = nn.Parameter(model.weight("t").detach()[row : row + 1].clone())
    expected = make([oracle])
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # the count of steps is the table's
    for key, value in expected.state[oracle].items():
        if isinstance(value, Tensor) and value.dim():
            expected.state[oracle][key] = torch.full_like(oracle, 0.3 if name == "adagrad" else 0.0)
    oracle.grad = torch.ones_like(oracle)
    output.sum().backward()
    optimizer.step()
    expected.step()
    torch.testing.assert_close(model.weight("t").detach()[row], oracle.detach()[0])


def test_a_decayed_state_of_unknown_age_is_refused_in_a_table_that_does_not_evict() -> None:
    model = converted(hashing=HashConfig.raw_ids())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    optimizer.param_groups[0]["weight_decay"] = 0.5
    learn(model, optimizer, (1,), (1,))
    resumed = converted(hashing=HashConfig.raw_ids())
    first, second = SGD(resumed.parameters(), lr=0.1), OPTIMIZERS["momentum"](resumed.parameters())
    resumed.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learn(resumed, first, (7,))
    with refused("evict_needs_fused_optimizer", match="may be older"):
        second.step()


def test_a_table_that_does_not_evict_is_decayed_by_any_optimizer() -> None:
    model = converted(hashing=HashConfig.raw_ids())
    learn(model, Adafactor(model.parameters(), weight_decay=0.1), (1,), (2,))


class LookAhead(torch.optim.Optimizer):
    """A second copy of the weights follows slowly; it begins as what they are."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                slow = self.state[weight].setdefault("slow", weight.clone())
                slow.lerp_(weight.sub_(group["lr"] * weight.grad), 0.5)
                weight.copy_(slow)


@pytest.mark.parametrize("make", [LookAhead, torch.optim.ASGD])
def test_a_state_that_begins_as_a_copy_of_the_weight_is_refused(make: Any) -> None:
    collection = recfx.convert(one_table(["f"]), hashing=EVICTS)
    collection(bags({"f": [[7], [8]]})).values().sum().backward()
    before = collection.embedding_bags["t"].weight.detach().clone()
    with refused("evict_needs_fused_optimizer"):
        make(collection.parameters(), lr=0.1).step()
    assert torch.equal(collection.embedding_bags["t"].weight, before)
