"""Several Python threads on one index."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recfx.hashing import HashConfig, HashIndex
from tests.hashing.dictionary import Dictionary

SECONDS = 60  # a deadlock would last for ever


def run_together(*works: Callable[[], object]) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], object]) -> None:
        try:
            start.wait(SECONDS)
            work()
        except BaseException as error:  # what a thread raises would be lost
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    "config",
    [
        {"on_full": "evict", "evict": "lru"},
        {"on_full": "evict", "evict": "lfu", "admit_after": 2},
        {"on_full": "share", "buckets": 1},
    ],
)
def test_readers_and_writers(config: dict[str, Any]) -> None:
    """Every find sees -1 or a row of the id's bucket; ids that are in every batch never lose theirs."""
    settings = HashConfig(**{"buckets": 4, "unseen": "zeros", **config})
    index, model = HashIndex(256, config=settings), Dictionary(256, settings)
    kept = torch.arange(-8, 8)
    rows_of_kept = index.insert(kept.repeat(2)).rows[:16]
    universe = torch.arange(100, 900)
    buckets = [model.bucket(int(id_)) for id_ in universe]
    lowest, end = (torch.tensor([getattr(bucket, name) for bucket in buckets]) for name in ("start", "stop"))
    writing = threading.Event()
    reads = [0, 0]

    def read(number: int, look_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        while not writing.is_set():
            rows = look_up(torch.cat([kept, universe]))
            assert torch.equal(rows[:16], rows_of_kept)
            shared = rows[16:]
            assert ((shared == -1) | ((shared >= lowest) & (shared < end))).all()
            taken = shared[shared >= 0]
            assert taken.unique().numel() == taken.numel(), "two ids with one row: half a batch was seen"
            reads[number] += 1

    def write(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(150):
            ids = universe[torch.randint(0, 800, (60,), generator=generator)]
            rows = index.find_or_insert(torch.cat([kept, ids]))
            assert torch.equal(rows[:16], rows_of_kept)
            if step % 3 == 0:
                index.erase(ids[:20])

    def write_all() -> None:
        writers = [threading.Thread(target=write, args=(seed,), daemon=True) for seed in (2, 3)]
        for writer in writers:
            writer.start()
        try:
            write(1)
            for writer in writers:
                writer.join(SECONDS)
            assert not any(writer.is_alive() for writer in writers), "deadlock"
        finally:
            writing.set()

    run_together(write_all, lambda: read(0, index.find), lambda: read(1, index.answer))
    assert min(reads) > 0
    assert index.counters["batches"] == 1 + 3 * 150
    assert index.lock.item() == 0
    rebuilt = HashIndex(256, config=settings)
    rebuilt.load_state_dict(index.state_dict())
    for name in ("row_ids", "row_state", "bucket_taken", "free_rows", "counts"):
        assert torch.equal(getattr(index, name), getattr(rebuilt, name)), name
    ids, rows = index.items()
    assert torch.equal(index.find(ids), rows)
    assert index.longest_probe() < 64
    assert torch.equal(index.find(universe), rebuilt.find(universe))


def test_what_several_threads_are_answered_is_all_counted() -> None:
    index = HashIndex(64)
    ids = torch.arange(500)

    def answer() -> None:
        for _ in range(300):
            index.answer(ids)

    run_together(answer, answer, answer)
    assert index.counters["ids_seen"] == 3 * 300 * 500
    assert index.counters["unseen_answers"] == 3 * 300 * 500
