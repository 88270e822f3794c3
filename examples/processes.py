"""Helpers for the examples of sharded training: this process and its peers."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology

from recfx.planner.topology import npu_topology

PATIENCE = timedelta(seconds=60)  # how long to wait for a peer that has died


@contextmanager
def process_group(device: torch.device, **rendezvous: Any) -> Iterator[None]:
    """The group of ``rendezvous``, or the one that torchrun describes in the environment, or this process alone."""
    join_group(device, **rendezvous)
    try:
        yield
        gc.collect()  # models that outlive their group may abort the process when Python exits
        dist.barrier()  # no process exits while a peer still communicates
    finally:
        dist.destroy_process_group()


def join_group(device: torch.device, **rendezvous: Any) -> None:
    """Begin :func:`process_group`."""
    if "RANK" not in os.environ:
        rendezvous = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device.type]
    dist.init_process_group(backend, timeout=PATIENCE, **rendezvous)


def find_device(name: str) -> torch.device:
    """The device of this process; if there is none, the program exits and says what is missing.

    The first process of a host gets the device of that name, the others get the ones that follow.
    """
    try:
        if name.startswith("npu"):
            import torch_npu  # noqa: F401  # registers the name with torch
        device = torch.device(name)
        if device.type != "cpu":
            device = torch.device(device.type, (device.index or 0) + int(os.environ.get("LOCAL_RANK", "0")))
        torch.empty(0, device=device)
    except ImportError:
        sys.exit(f"--device {name} needs torch_npu, Ascend's package for torch, which is not installed here.")
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with the backend
        sys.exit(f"--device {name} cannot be used here: {str(error).splitlines()[0]}")
    return device


def asked_device() -> torch.device:
    """The device after ``--device`` on the command line; the CPU without it, as in a notebook."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    return find_device(parser.parse_known_args()[0].device)


def topology(device: torch.device, world_size: int, local_world_size: int) -> Topology:
    """What TorchRec's planners know about the hosts; TorchRec itself has no figures for NPUs."""
    if device.type == "npu":
        return npu_topology(world_size, local_world_size=local_world_size)
    return Topology(world_size, compute_device=device.type, local_world_size=local_world_size)


def quiet() -> None:
    """Silence what TorchRec and torch log and warn about each other."""
    warnings.simplefilter("ignore", FutureWarning)
    for name in ("", "torchrec", "torch.fx"):  # TorchRec also logs to the root logger
        logging.getLogger(name).setLevel(logging.ERROR)


def in_order(text: str) -> None:
    """Print the text of every rank, in the order of ranks."""
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    print_once("\n".join(texts))


def print_once(*values: object) -> None:
    """Print on rank 0, even before there is a group."""
    if os.environ.get("RANK", "0") == "0":
        print(*values, flush=True)
