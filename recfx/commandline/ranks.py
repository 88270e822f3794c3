"""``--ranks`` and ``--hardware``: what a model is planned for."""

from __future__ import annotations

import argparse

from torchrec.distributed.planner import Topology

from recfx.collections.sharding.whole_plan import MOST_RANKS
from recfx.commandline.command import WrongUsage
from recfx.planner.pricing.hardware import ASCEND_910B, H100, Hardware
from recfx.planner.topology import NpuTopology, npu_topology

_HARDWARE = {"ascend_910b": ASCEND_910B, "h100": H100}


def add_hardware(
    parser: argparse.ArgumentParser, help: str = "what times are predicted for (default: this machine's CPU)"
) -> None:
    """Add the option ``--hardware``."""
    parser.add_argument("--hardware", choices=sorted(_HARDWARE), help=help)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--ranks``."""
    help = "as rank 0 of so many would have it if recfx.plan sharded it; they need not be there"
    parser.add_argument("--ranks", metavar="W", type=int, help=help)


def topology_of(given: argparse.Namespace) -> Topology | NpuTopology | Hardware | None:
    """What ``recfx.cost`` and ``recfx.draw`` take.

    Raises:
        WrongUsage: ``--ranks`` is no number of ranks.
    """
    if given.ranks is None:
        return _HARDWARE.get(given.hardware)
    if given.ranks < 1:
        raise WrongUsage(f"--ranks {given.ranks}: there must be one at least")
    if given.ranks > MOST_RANKS:
        raise WrongUsage(f"--ranks {given.ranks}: there can be {MOST_RANKS:,} at most")
    if given.hardware == "ascend_910b":
        return npu_topology(given.ranks)
    return Topology(given.ranks, "cuda" if given.hardware == "h100" else "cpu", created_by_factory=True)
