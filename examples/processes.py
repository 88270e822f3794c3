"""What the examples of sharded training share: this process and its peers."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)  # with a peer that has died


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The group that torchrun describes in the environment, or a group of this process alone."""
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    if device.type != "cpu":
        torch.get_device_module(device).set_device(int(os.environ["LOCAL_RANK"]))
    backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device.type]
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield
        gc.collect()  # models that outlive their group may abort the process when Python ends
        dist.barrier()  # nobody leaves while a peer still talks
    finally:
        dist.destroy_process_group()


def find_device(name: str) -> torch.device:
    """The device of that name; ends the program with what is missing where there is none."""
    try:
        if name.startswith("npu"):
            import torch_npu  # noqa: F401  # teaches torch the name
        device = torch.device(name)
        torch.empty(0, device=device)
    except ImportError:
        sys.exit(f"--device {name} needs torch_npu, Ascend's package for torch, which is not installed here.")
    except (RuntimeError, AssertionError) as error:  # torch asserts for backends that it was built without
        sys.exit(f"--device {name} cannot be used here: {str(error).splitlines()[0]}")
    return device


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def quiet() -> None:
    """Leave out what TorchRec and torch say about each other."""
    warnings.simplefilter("ignore", FutureWarning)
    for name in ("", "torchrec", "torch.fx"):  # TorchRec also writes to the root's
        logging.getLogger(name).setLevel(logging.ERROR)


def in_order(text: str) -> None:
    """Print what every rank has to say, rank after rank."""
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    print_once("\n".join(texts))


def print_once(*values: object) -> None:
    """Print on rank 0, also before there is a group."""
    if os.environ.get("RANK", "0") == "0":
        print(*values, flush=True)
