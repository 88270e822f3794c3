"""What every test gets: fixed seeds, few threads, one Hypothesis profile, and the data directory."""

import functools
import gc
import logging
import os
import random
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

# Threads of one process wait for each other without turning: others that test need the cores. OpenMP reads it once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch

from tests.ascend.faster_interpreter import make_faster
from tests.support.needs import no_pt2_skips
from tests.support.pages import chromium, page  # noqa: F401  # of several packages
from tests.support.room import with_room


class _TorchRandom:
    """torch's global generator as Hypothesis asks for it: seeded before each example, restored after."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random = _TorchRandom()  # Hypothesis keeps only a weak reference
hypothesis.register_random(_torch_random)

hypothesis.settings.register_profile(
    "recfx",
    deadline=None,  # the first example pays for imports and compilation
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("recfx-ci", hypothesis.settings.get_profile("recfx"), derandomize=True)


# `torch.manual_seed` seeds devices that are not there as well: each time, it formats the stack and keeps that for ever.
for _backend in (torch.cuda, torch.mtia, torch.xpu):
    if not _backend.is_available():
        _backend.manual_seed_all = lambda seed: None


# After each compilation, torch flushes the caches of the processor and times the guards, for its log alone.
torch._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0


# Half a minute of work or more in few tests: they compile C++, run examples, or run tests in processes of their own.
_LONG_FILES = frozenset(
    {
        "test_convert.py", "test_doctor.py", "test_examples.py", "test_faults.py", "test_hivm.py",
        "test_interpreted.py", "test_interpreted_targets.py", "test_linalg.py", "test_on_device.py",
        "test_serve_cpp.py", "test_thread_safety.py", "test_tiling.py",
    }
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile", None):
        hypothesis.settings.load_profile("recfx-ci" if os.environ.get("CI") else "recfx")
    # Results depend on the number of threads (the order of sums does), and the threads of several processes that test
    # would wait for each other. What has threads of its own is tested with two: the fixture below.
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
    # Shells start background jobs with Ctrl-C ignored, and so would be all processes that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.pop("COLUMNS", None)  # the width of a terminal, which tests do not have
    if os.environ.get("TRITON_INTERPRET") == "1":
        make_faster()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Give what a test calls room for Python's frames."""
    function = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(with_room, function)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first: of several processes, none is left alone with one at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.name not in _LONG_FILES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process that ends in the middle of a test takes no other tests with it, and nothing waits for them for ever."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.whole_files import WholeFiles

    return WholeFiles(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    with no_pt2_skips():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    with no_pt2_skips():
        return (yield)


def pytest_collection_finish() -> None:
    """What imports have made stays, and is millions of objects: garbage collection need not look at them each time."""
    _leave_out_of_collections()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Caches that the tests of a file have filled stay, too; in a process that runs many files, they are more still."""
    if nextitem is None or nextitem.path != item.path:
        _leave_out_of_collections()


def _leave_out_of_collections() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> Iterator[None]:
    """Each test starts from the same random state, the default dtype and levels of logs, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    loggers = [logging.getLogger(name) for name in ("", "torchrec", "torch.fx")]
    levels = [logger.level for logger in loggers]
    yield
    torch.set_default_dtype(dtype)
    for logger, level in zip(loggers, levels, strict=True):  # examples set them
        logger.setLevel(level)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For what distributes its work over torch's threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """The folder of real data sets, from ``RECFX_DATA``; tests that need it are skipped where it is not set."""
    value = os.environ.get("RECFX_DATA")
    if not value:
        pytest.skip("RECFX_DATA is not set: point it at the folder that holds ml-100k/ and criteo_sample.csv")
    directory = Path(value)
    if not directory.is_dir():
        pytest.fail(f"RECFX_DATA={value} is not a folder")
    return directory
