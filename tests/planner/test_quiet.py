"""What TorchRec's planner warns of is not said where it means nothing; everything else is."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import warnings

import pytest

from recfx.planner.plan import without_noise

_SCRIPT = """
import logging, sys, tempfile
from torch import nn
from torchrec.distributed.planner import Topology
import recfx
from recfx.planner.topology import npu_topology
from tests.builders.collections import tables_named

model = nn.ModuleDict({"ebc": tables_named("a", "b", "c")})
logging.getLogger().handlers.clear()
for topology in (npu_topology(2), Topology(2, "cuda", created_by_factory=True)):
    recfx.plan(model, topology)
    recfx.cost(model, topology).at(8, W=4)
    recfx.draw(model, tempfile.mkdtemp() + "/model.html", topology)
assert logging.getLogger().handlers == []
"""


def test_planning_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "always", "-c", _SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "planner" in line or "Sharding spec" in line]
    assert lines == []


NOISE = [
    (logging.getLogger(), "Sharding spec not found for ebc.a"),
    (
        logging.getLogger("torchrec.distributed.planner.storage_reservations"),
        "There is a known issue with TorchRec's dense tensor size calculation",
    ),
]


@pytest.mark.parametrize(("logger", "message"), NOISE)
def test_what_is_left_out(logger: logging.Logger, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with without_noise():
        logger.warning(message)
        assert caplog.messages == []
        logger.warning("something else")
        other = threading.Thread(target=logger.warning, args=(message,))
        other.start()
        other.join(60)
        assert not other.is_alive()
    logger.warning(message)
    assert caplog.messages == ["something else", message, message]
    assert logger.filters == []


def test_other_warnings_stay() -> None:
    with pytest.warns(FutureWarning, match="soon") as seen:
        _warn_twice()
    assert len(seen) == 1


def _warn_twice() -> None:
    with without_noise():
        warnings.warn("HeuristicalStorageReservation is known to cause issues, ...", FutureWarning, stacklevel=1)
        warnings.warn("soon", FutureWarning, stacklevel=1)


def test_a_logger_without_handlers_stays_without(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with without_noise():
        logging.warning("this is shown")
    assert root.handlers == []
