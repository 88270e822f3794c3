"""The process groups that a sharded collection communicates in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from recfx.errors import ConversionError


@dataclass(frozen=True)
class DistGroups:
    """Process groups.

    Args:
        ids: of all ranks, for ids: gloo where ids are hashed on the host of another device.
        pooled: of all ranks, for pooled rows.
        intra: of the ranks of this host, where tables are cut inside a host; else ``pooled``.
        cross: of this rank's counterparts on all hosts; else ``pooled``.
    """

    ids: dist.ProcessGroup
    pooled: dist.ProcessGroup
    intra: dist.ProcessGroup
    cross: dist.ProcessGroup

    @property
    def ids_on_host(self) -> bool:
        """Whether the group of the ids takes CPU tensors alone."""
        return dist.get_backend(self.ids) == "gloo"

    @classmethod
    def of(cls, env: ShardingEnv, local_size: int, host_group: dist.ProcessGroup | None = None) -> DistGroups:
        """The groups of ``env``; makes those of hosts of ``local_size`` ranks where there are any (collective).

        Raises:
            ConversionError: ``no_process_group``.
        """
        group = env.process_group
        if group is None:
            raise ConversionError(
                "the sharding environment has no process group.",
                reason="no_process_group",
                what_to_do="call torch.distributed.init_process_group, and pass ShardingEnv.from_process_group(...).",
            )
        intra, cross = _host_groups(group, local_size) if local_size > 1 else (group, group)
        return cls(host_group or group, group, intra, cross)


def sent_on(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must be for the group to send it: the backends of accelerators send nothing from the host."""
    found = None if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def replicate(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Copy rank 0's values into the tensors of all ranks. Collective."""
    sent = tensor.detach().to(sent_on(group))
    dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
    tensor.detach().copy_(sent)


HostGroups = tuple[dist.ProcessGroup, dist.ProcessGroup]
_made: WeakKeyDictionary[dist.ProcessGroup, dict[int, HostGroups]] = WeakKeyDictionary()  # by ranks of a host


def _host_groups(group: dist.ProcessGroup, local_size: int) -> HostGroups:
    """Groups of this rank's host, and across hosts; made once, as they hold sockets."""
    made = _made.setdefault(group, {})
    if local_size not in made:
        ranks = dist.get_process_group_ranks(group)
        host, local = divmod(group.rank(), local_size)
        backend, timeout = dist.get_backend(group), _timeout(group)
        intra, cross = (
            dist.new_group(peers, timeout, backend, use_local_synchronization=True)
            for peers in (ranks[host * local_size : (host + 1) * local_size], ranks[local::local_size])
        )
        made[local_size] = intra, cross
    return made[local_size]


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """What the group was made with: torch would give a new one its default, half an hour with gloo."""
    options = getattr(group._get_backend(sent_on(group)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
