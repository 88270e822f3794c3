"""Processes that are forked while threads of the parent use an index."""

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
from torchrec import KeyedJaggedTensor

from recfx.collections.hash_collections import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.hashing import HashConfig, HashIndex

ROWS = 20_000
PATIENCE = 60.0  # seconds: a child that waits for nobody needs milliseconds


def in_child(work: Callable[[], object]) -> None:
    """Run ``work`` in a forked child; fail if it raises or does not come back."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    until = time.monotonic() + PATIENCE
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits for ever")
        time.sleep(0.001)


@pytest.fixture
def hammered() -> Iterator[HashIndex]:
    """An index that two threads write and read without a pause."""
    index = HashIndex(ROWS, config=HashConfig(on_full="evict"))
    stop, errors = threading.Event(), []

    def hammer(first: int) -> None:
        batch = first
        try:
            while not stop.is_set():
                batch += 4096
                index.insert(torch.arange(batch, batch + 4096) % (3 * ROWS))
                index.find(torch.arange(4096))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=hammer, args=(first,)) for first in (0, 977)]
    for thread in threads:
        thread.start()
    yield index
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors


def use(index: HashIndex) -> None:
    new = torch.arange(10**6, 10**6 + 5000)
    rows = index.insert(new).rows
    assert torch.equal(index.find(new), rows)
    index.erase(new[:10])
    ids, rows = index.items()
    assert torch.equal(index.find(ids), rows), "half a batch is in the index"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_forked_while_other_threads_write(hammered: HashIndex) -> None:
    for _ in range(20):
        in_child(lambda: use(hammered))


def check_warning(index: HashIndex) -> None:
    logged: list[str] = []
    logging.getLogger("recfx").addFilter(lambda record: not logged.append(record.getMessage()))
    index.find(torch.arange(10))
    index.find(torch.arange(10))
    assert torch.get_num_threads() == 1
    assert len(logged) == 1
    assert "'spawn'" in logged[0]


def test_forked_after_the_parent_used_many_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        index = HashIndex(ROWS)
        ids = torch.arange(10**6, 10**6 + 10_000)
        index.insert(ids)  # OpenMP has its threads now
        assert torch.ones(10**6).sum() == 10**6
        in_child(lambda: use(index))
        in_child(lambda: use(HashIndex(ROWS)))
        in_child(lambda: check_warning(index))
    finally:
        torch.set_num_threads(threads)


def test_a_lock_for_new_rows_that_another_thread_held() -> None:
    table = HashEmbeddingBagConfig(
        name="t", num_embeddings=40, embedding_dim=4, feature_names=["t"], hashing=HashConfig(dense_rows=0)
    )
    collection = HashEmbeddingBagCollection([table])
    is_locked, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with collection.store.new_rows_lock:
            is_locked.set()
            let_go.wait(2 * PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_locked.wait(PATIENCE)
    features = KeyedJaggedTensor(["t"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    try:
        in_child(lambda: collection.train()(features))
    finally:
        let_go.set()
        thread.join(PATIENCE)
