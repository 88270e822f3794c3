"""Whoever copies the map from ids to rows can tell whether it has changed."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from recfx.errors import TableFullError
from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index import hash_index


def filled() -> HashIndex:
    index = HashIndex(6, config=HashConfig(on_full="evict", evict="ttl", ttl_batches=9))
    index.insert(torch.tensor([70, -1, 5]))
    return index


def written(index: HashIndex) -> None:
    """As torch.distributed.checkpoint loads: in place."""
    state = copy.deepcopy(index.state_dict())
    index.insert(torch.tensor([99]))
    now = index.state_dict()
    for name, value in state.items():
        now[name].copy_(value)
    index.refresh()


CHANGES: dict[str, Callable[[HashIndex], object]] = {
    "insert": lambda index: index.insert(torch.tensor([71])),
    "evict": lambda index: [index.insert(torch.tensor([number])) for number in (200, 201, 202, 203)],
    "expire": lambda index: [index.insert(torch.tensor([70])) for _ in range(10)],
    "erase": lambda index: index.erase(torch.tensor([-1])),
    "reset": lambda index: index.reset(),
    "load": lambda index: index.load_state_dict(index.state_dict()),
    "load of another": lambda index: index.load_state_dict(HashIndex(6, config=index.config).state_dict()),
    "written in place": written,
    "meta": lambda index: index.to("meta").to_empty(device="cpu"),
    "to_empty": lambda index: index.to_empty(device="cpu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_show(change: str) -> None:
    index = filled()
    before = index.map_version
    CHANGES[change](index)
    index.refresh()
    assert index.map_version != before
    assert index.map_version == index.map_version


def test_reading_and_training_known_ids_does_not_show() -> None:
    index = filled()
    before = index.map_version
    for method in (index.find, index.answer, index.insert):
        method(torch.tensor([70, -1, 5]))
    index.mark_used()
    assert index.map_version == before


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda index: pickle.loads(pickle.dumps(index))])
def test_copies_differ(duplicate: Callable[[HashIndex], HashIndex]) -> None:
    index = filled()
    assert duplicate(index).map_version != index.map_version


def test_a_batch_that_is_refused_changes_nothing() -> None:
    index = HashIndex(2)
    index.insert(torch.tensor([1]))
    before = index.map_version
    with pytest.raises(TableFullError):
        index.insert(torch.tensor([2, 3]))
    assert index.map_version == before


@pytest.mark.parametrize("change", ["erase", "load"])
def test_whoever_copies_in_the_middle_of_a_change_has_neither_state(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that is read while a change runs, perhaps before it, is that of no state."""
    index, during = filled(), []
    before = index.map_version

    def noting(function: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object) -> object:
            during.append(index.map_version)
            return function(*arguments)

        return noted

    if change == "erase":
        monkeypatch.setattr(hash_index, "erase", noting(hash_index.erase))
    else:
        monkeypatch.setattr(torch, "_foreach_copy_", noting(torch._foreach_copy_))
    CHANGES[change](index)
    assert len(during) == 1
    assert index.map_version not in (before, during[0])


class Counts:
    """Counts of eval mode that are somewhere else, for a while."""

    def __init__(self, index: HashIndex) -> None:
        self.index = index
        index.counted_elsewhere(self.fold)

    def fold(self) -> None:
        self.index.eval_counts += torch.tensor([10, 3])


def test_counts_from_elsewhere_are_added_once() -> None:
    index = filled()
    Counts(index)
    for _ in range(2):
        assert (index.counters["ids_seen"], index.counters["unseen_answers"]) == (13, 3)
    Counts(index)
    copied = copy.deepcopy(index)
    assert (copied.counters["ids_seen"], index.counters["ids_seen"]) == (23, 23)
    Counts(index)
    index.load_state_dict(filled().state_dict())
    assert (index.counters["ids_seen"], index.counters["unseen_answers"]) == (3, 0)
