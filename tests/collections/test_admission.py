"""Tables that admit an id after it has been seen often enough: what it reads and trains until then."""

from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.errors import InputError
from recfx.hashing import HashConfig
from tests.builders.batches import one_bag
from tests.builders.collections import table
from tests.builders.optimizers import OPTIMIZERS
from tests.support.lifecycle import pair
from tests.support.refusals import refused

UNSEEN = ("zeros", "share")


def admits(after: int, **options: Any) -> HashConfig:
    return HashConfig(dense_rows=0, admit_after=after, **options)


@pytest.mark.parametrize("attach", ["before", "after"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("unseen", UNSEEN)
def test_training_follows_the_ids(unseen: str, optimizer: str, attach: str) -> None:
    configs = {
        "t1": admits(2, unseen=unseen, on_full="evict"),
        "t2": admits(3, unseen=unseen, on_full="evict", evict="lfu"),
    }
    both = pair(configs, optimizer, attach=attach)
    for step in range(20):
        both.step()
        if step % 8 == 7:
            both.evaluate(both.batch(universe=60))
    assert min(oracle.ids.counters["unseen_answers"] for oracle in both.oracle.values()) > 20
    assert both.total("evicted") > 0


@pytest.mark.parametrize("unseen", UNSEEN)
@pytest.mark.parametrize(("mean", "is_weighted"), [(True, False), (False, True)])
def test_an_id_without_a_row_counts_in_the_mean_and_has_a_weight(unseen: str, mean: bool, is_weighted: bool) -> None:
    configs = {"t1": admits(2, unseen=unseen), "t2": admits(2, unseen=unseen, on_full="share")}
    both = pair(configs, "adagrad", mean=mean, is_weighted=is_weighted)
    for _ in range(15):
        both.step(both.batch(universe=25))
    both.evaluate(both.batch(universe=60))
    assert both.total("inserted") > 30


def test_rows_in_flight_with_admission() -> None:
    config = admits(2, on_full="evict", unseen="share")
    both = pair({"t1": config, "t2": config}, "adagrad")
    waiting = both.forward(both.batch(universe=60, longest=4))
    for _ in range(12):
        following = both.forward(both.batch(universe=60, longest=4), batches_in_flight=1)
        both.backward(waiting)
        waiting = following
    both.backward(waiting)
    assert both.total("evicted") > 0


def features(ids: list[int], weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    return one_bag(*ids, weights=weights)


def model_of(config: HashConfig, *, rows: int = 10, is_weighted: bool = False) -> Any:
    plain = EmbeddingBagCollection([table("t", ["f"], dim=4, rows=rows)], is_weighted=is_weighted)
    return recfx.convert(plain, hashing=config)


def test_a_dense_gradient_reaches_admitted_ids_alone() -> None:
    """Without a fused optimizer: ``weight.grad``."""
    for unseen in UNSEEN:
        model = model_of(admits(2, unseen=unseen))
        model(features([5, 6, 6, 7])).values().sum().backward()
        row = int(model.index("t").find(torch.tensor([6])))
        expected = torch.zeros(10, 4)
        expected[row] = 2
        assert torch.equal(model.weight("t").grad, expected)


def test_a_whole_batch_is_counted_before_anybody_is_admitted() -> None:
    model = model_of(admits(3))
    output = model(features([5, 6, 5, 5])).values()
    row = model.weight("t").detach()[model.index("t").find(torch.tensor([5]))]
    torch.testing.assert_close(output.detach(), 3 * row)
    ids, sightings = model.index("t").candidates()
    assert (ids.tolist(), sightings.tolist()) == ([6], [1])


def test_the_weight_of_an_id_that_is_not_admitted_gets_no_gradient() -> None:
    """There is none of zeros; that of a shared row is refused."""
    weights = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
    model = model_of(admits(2, unseen="zeros"), is_weighted=True)
    model(features([5, 6, 6], weights)).values().sum().backward()
    own = model.weight("t").detach().sum(1)[model.index("t").find(torch.tensor([6]))].repeat(2)
    torch.testing.assert_close(weights.grad, torch.cat([torch.zeros(1), own]))
    model = model_of(admits(2, unseen="share"), is_weighted=True)
    with refused("weights_require_grad", error=InputError):
        model(features([5, 6, 6], weights))


def test_eval_counts_no_sightings() -> None:
    model = model_of(admits(2))
    model(features([5]))
    model.eval()
    for _ in range(5):
        assert (model(features([5, 6])).values() == 0).all()
    model.train()
    model(features([6]))
    ids, sightings = model.index("t").candidates()
    assert (ids.tolist(), sightings.tolist()) == ([5, 6], [1, 1])
