"""The process groups in which a sharded collection communicates, and the precision in which it sends rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torchrec.distributed.types import QuantizedCommCodecs, ShardingEnv

from recfx.errors import ConversionError, RecfxError, type_of
from recfx.ir.ways_back import COMM_OPS, Precision, Wire, Wires
from recfx.versions.differences import GroupName


@dataclass(frozen=True)
class DistGroups:
    """The process groups of one collection."""

    # All ranks, for ids only. gloo matches messages by their order, so a rank that is out of step must not be able to
    # send ids where pooled rows or gradients are expected. If ``pooled`` does not send from the host, and no separate
    # group is given for ids, it is ``pooled`` itself
    ids: dist.ProcessGroup
    pooled: dist.ProcessGroup  # all ranks, for pooled rows
    intra: dist.ProcessGroup  # the ranks of this host, if tables are cut within hosts; otherwise ``pooled``
    # This rank's counterparts on all hosts, if tables are cut within hosts; otherwise ``pooled``
    cross: dist.ProcessGroup
    number: int  # which of the collections sharded in these groups it is, from 1: the same on all ranks

    @property
    def ids_on_host(self) -> bool:
        """Whether the group for ids only takes CPU tensors."""
        return sent_on(self.ids).type == "cpu"

    @classmethod
    def of(cls, env: ShardingEnv, local_size: int, host_group: dist.ProcessGroup | None = None) -> DistGroups:
        """The groups of ``env``; creates missing ones, once per process group. Collective. ``local_size`` is the number
        of ranks per host, if tables are cut within hosts, otherwise 0; ``host_group`` is the group for ids, if the
        caller has one.
        """
        group = env.process_group
        if group is None:
            raise ConversionError(
                "the sharding environment has no process group.",
                reason="no_process_group",
                what_to_do="call torch.distributed.init_process_group, and pass ShardingEnv.from_process_group(...).",
            )
        intra, cross = _host_groups(group, local_size) if local_size > 1 else (group, group)
        ids = host_group or group
        if host_group is None and group.size() > 1 and sent_on(group).type == "cpu":
            (ids,) = _once(group, "ids", lambda: [dist.get_process_group_ranks(group)])
        _sharded[ids] = _sharded.get(ids, 0) + 1
        return cls(ids, group, intra, cross, _sharded[ids])


def refuse_destroyed(group: dist.ProcessGroup, error: type[RecfxError] = ConversionError) -> None:
    """Refuse a group that ``destroy_process_group`` has ended: torch would take each rank for alone, or fail."""
    if group not in c10d._world.pg_map:
        raise error(
            "the process group of the ranks that hold the tables was destroyed.",
            reason="no_process_group",
            what_to_do="call this before torch.distributed.destroy_process_group(), on all ranks.",
        )


def sent_on(group: dist.ProcessGroup) -> torch.device:
    """The device on which a tensor must be for the group to send it: accelerator backends cannot send from the host."""
    refuse_destroyed(group)
    backends = {backend.rpartition(":")[2] for backend in dist.get_backend(group).split(",")}  # as in "cpu:gloo"
    device = None if backends == {"gloo"} else torch.accelerator.current_accelerator(check_available=True)
    return device or torch.device("cpu")


def replicate(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Copy rank 0's values into the tensors of all ranks, unless they are on meta. Collective."""
    if tensor.is_meta:
        return
    sent = tensor.detach().to(sent_on(group))
    dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
    tensor.detach().copy_(sent)


_Made = tuple[dist.ProcessGroup, ...]
_made: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Made]] = WeakKeyDictionary()  # by purpose
_sharded: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # how many collections, by group for ids


def _host_groups(group: dist.ProcessGroup, local_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups within this rank's host, and across hosts."""

    def members() -> list[list[int]]:
        ranks = dist.get_process_group_ranks(group)
        host, local = divmod(group.rank(), local_size)
        return [ranks[host * local_size : (host + 1) * local_size], ranks[local::local_size]]

    intra, cross = _once(group, f"hosts of {local_size}", members)
    return intra, cross


def _once(group: dist.ProcessGroup, purpose: str, members: Callable[[], list[list[int]]]) -> _Made:
    """New groups, one per list of global ranks; cached, because they hold sockets. Collective in ``group``. They are
    made like those of ``torch.distributed.new_group``, which names one after the number of the process's groups. Ranks
    that are in different numbers of groups would therefore wait for each other under different names. The names here
    start with the name of ``group``, which its ranks agree on.
    """
    of_group = _made.setdefault(group, {})
    if purpose in of_group:
        return of_group[purpose]
    whole = c10d._get_default_group()
    _, store = c10d._world.pg_map[whole]
    backend, timeout = c10d.Backend(dist.get_backend(group)), _timeout(group)
    made = []
    for position, ranks in enumerate(members()):
        new, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(whole.rank()),
            ranks,
            backend,
            store,
            GroupName(f"{group.group_name} recfx {purpose} {position}: {ranks}"),
            timeout=timeout or c10d._get_default_timeout(backend),
            device_id=whole.bound_device_id,
            group_desc=f"recfx: {purpose}",
        )
        c10d._world.pg_group_ranks[new] = {rank: number for number, rank in enumerate(ranks)}
        made.append(new)
    of_group[purpose] = tuple(made)
    return of_group[purpose]


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of the group; a new group would get torch's default, which is half an hour with gloo."""
    options = getattr(group._get_backend(sent_on(group)), "options", None)
    return getattr(options, "_timeout", None)


def wires_of(registry: Mapping[str, QuantizedCommCodecs] | None) -> Wires:
    """What a sharder's ``qcomm_codecs_registry`` says, without what it leaves in float32."""
    wires = {}
    for name, codecs in (registry or {}).items():
        if name not in COMM_OPS.values():
            raise _refused(f"{name!r} is none of {', '.join(dict.fromkeys(COMM_OPS.values()))}")
        if not isinstance(codecs, QuantizedCommCodecs):
            raise _refused(f"{name} has {type_of(codecs)}")
        wires[name] = Wire(_precision(name, codecs.forward), _precision(name, codecs.backward))
    return {name: wire for name, wire in wires.items() if wire != Wire()}


def _precision(name: str, codec: Any) -> Precision:
    from fbgemm_gpu.quantize_comm import QuantizedCommCodec  # takes long, and few programs need it

    if type(codec) is not QuantizedCommCodec:
        raise _refused(f"{name} has {type_of(codec)}")
    precision = codec._comm_precision.value
    if precision not in ("fp32", "fp16", "bf16"):
        raise _refused(f"{name} has {precision}")
    return Precision(precision, codec._loss_scale)


def _refused(why: str) -> ConversionError:
    return ConversionError(
        f"rows cannot be sent as qcomm_codecs_registry says: {why}.",
        reason="quantized_communication",
        what_to_do="use what torchrec.distributed.fbgemm_qcomm_codec.get_qcomm_codecs_registry returns for "
        "QCommsConfig(CommType.FP16, CommType.BF16), in which both can be FP32, FP16 or BF16; or leave it out: rows "
        "are then sent as they are.",
    )


def codecs_of(wire: Wire) -> QuantizedCommCodecs:
    """TorchRec's codecs for its modules that send rows."""
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs

    forward, backward = wire
    config = QCommsConfig(
        forward_precision=CommType(forward.name),
        backward_precision=CommType(backward.name),
        forward_loss_scale=forward.loss_scale,
        backward_loss_scale=backward.loss_scale,
    )
    return get_qcomm_codecs(config)
