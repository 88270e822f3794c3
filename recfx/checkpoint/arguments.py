"""Checks of the arguments of ``save_checkpoint`` and ``load_checkpoint``, made before anything else."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from recfx.checkpoint.peers import Peers
from recfx.discovery.wrappers import unwrap
from recfx.errors import CheckpointError, type_of


def checked_model(model: object) -> tuple[nn.Module, Peers]:
    """The model without wrappers, and the ranks that hold it together.

    Raises:
        CheckpointError: ``invalid_argument``, or what ``Peers.of`` says.
    """
    if not isinstance(model, nn.Module):
        raise CheckpointError(
            f"model is {type_of(model)}.",
            reason="invalid_argument",
            what_to_do="pass the torch.nn.Module first, the directory second.",
        )
    root = unwrap(model)
    return root, Peers.of(root)


def checked_directory(directory: object, peers: Peers) -> Path:
    """The directory as a path. Collective: an error on one rank is raised on all.

    Raises:
        CheckpointError: ``invalid_argument``.
    """

    def check() -> None:
        found = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
        if not isinstance(found, str):
            raise _wrong_directory(f"is {type_of(directory)}")
        if not found or "\0" in found:
            raise _wrong_directory(f"is {found!r}, which cannot be the name of a directory")

    peers.agree(check)
    assert isinstance(directory, (str, os.PathLike))
    return Path(directory)


def _wrong_directory(what: str) -> CheckpointError:
    return CheckpointError(
        f"directory {what}.",
        reason="invalid_argument",
        what_to_do="pass the path of a directory, as a str or a pathlib.Path.",
    )
