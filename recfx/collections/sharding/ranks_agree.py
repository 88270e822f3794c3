"""All ranks of a process group exchange something and then do the same: the one place where they ask each other."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.dist_data import SplitsAllToAllAwaitable
from torchrec.distributed.types import ShardedModule

from recfx.collections.converted_collection import ConvertedCollection
from recfx.errors import RecfxError, type_of
from recfx.runtime import marks
from recfx.runtime.dist_groups import DistGroups, refuse_destroyed, sent_on
from recfx.runtime.input_dist import InputDistStart
from recfx.runtime.marks import LostRanks, has_failed

_Result = TypeVar("_Result")
_UNREAD = 0  # of a message that is as long as others are
_LARGEST = 2**62 - 1


def on_all_ranks(
    group: dist.ProcessGroup | None, function: Callable[[], _Result], told: Callable[[BaseException], Exception | None]
) -> list[_Result]:
    """What ``function``, which must not be collective, returns on each rank. Collective. An error on this rank is
    raised here; other ranks raise what ``told`` makes of the first one's. If that is None, it is raised at once, here
    alone.
    """
    if group is None:
        return [function()]
    own: BaseException | None = None
    sent: Exception | None = None
    result: Any = None
    try:
        result = function()
    except BaseException as error:  # including Ctrl-C, because the other ranks wait for this one
        own, sent = error, told(error)
        if sent is None:
            raise
    answers: list[Any] = [None] * group.size()
    with LostRanks():
        dist.all_gather_object(answers, (sent, result), group=group)
    if own is not None:
        raise own
    failed = next((theirs for theirs, _ in answers if theirs is not None), None)
    if failed is not None:
        raise failed
    return [result_of_rank for _, result_of_rank in answers]


def any_rank(groups: Iterable[dist.ProcessGroup | None], flag: bool) -> bool:
    """Whether ``flag`` is set on any rank of these groups. Collective, once per group; None stands for no group."""
    for group in {id(group): group for group in groups if group is not None}.values():
        count = torch.tensor([int(flag)], device=sent_on(group))
        with LostRanks():
            dist.all_reduce(count, group=group)
        flag = bool(count > 0)
    return flag


def tell_counts(group: dist.ProcessGroup, first: int, second: int, mark: int, name: str) -> list[tuple[int, int]]:
    """Two numbers of every rank. Collective. The message is as long as the one that announces a batch's ids, so a rank
    that is at a different call can read ``mark``, which is one of ``marks.identity``.
    """
    row = torch.tensor([first, second, _UNREAD, mark, _UNREAD], device=sent_on(group))
    numbers = [number.expand(group.size()) for number in row]
    with LostRanks():
        firsts, seconds, _, marks_of_ranks, _ = SplitsAllToAllAwaitable(numbers, group).wait()
    different = marks.other_calls(marks_of_ranks, name, group)
    if different is not None:
        raise different
    return list(zip(firsts, seconds, strict=True))


_CALLS = {
    name: marks.identity(name, [], [])
    for name in ("save_checkpoint", "load_checkpoint", "export", "export_delta", "unconvert")
}


def begin_on_all_ranks(sharded: Sequence[Any], call: str) -> None:
    """Find out whether all ranks make this call of recfx, before any of them waits for another. Collective. Nothing is
    asked after a step that failed on a rank alone, whose messages may still be in the group for ids. ``sharded`` are
    the collections of one group.
    """
    if not sharded:
        return
    groups: DistGroups = sharded[0].groups
    if has_failed(groups.pooled):
        return
    started: list[InputDistStart] = [start for module in sharded for start in module._input_dists]
    run = sum(node.backwards.since_call() * 31**place for place, node in enumerate(started)) & _LARGEST
    runs = tell_counts(groups.ids, run, 0, _CALLS[call], sharded[0].collection)
    if call == "load_checkpoint" or len(set(runs)) == 1:
        return
    for start in started:  # which collection it is
        runs = tell_counts(groups.ids, start.backwards.since_call(), 0, _CALLS[call], start.collection)
        different = marks.different_backwards([of_rank for of_rank, _ in runs], "the last forward", start.collection)
        if different is not None:
            raise different


def group_of_model(
    model: nn.Module, error: type[RecfxError], *, call: str, if_several: str, if_sharded_alone: str
) -> dist.ProcessGroup | None:
    """The process group of a model's collections, once all ranks make this call; None if nothing is sharded.
    Collective. ``if_several`` and ``if_sharded_alone`` are advice: there are several groups, or TorchRec alone has
    sharded something.
    """
    group: dist.ProcessGroup | None = None
    sharded: list[Any] = []
    for path, module in model.named_modules():
        if isinstance(module, ConvertedCollection) and module.is_sharded:
            if group is not None and group is not module.process_group:
                raise error(
                    "the collection is in a different process group than the previous one.",
                    reason="several_process_groups",
                    module_path=path,
                    what_to_do=if_several,
                )
            group = module.process_group
            sharded.append(module)
        elif isinstance(module, ShardedModule):
            raise error(
                f"{type_of(module)} is sharded by TorchRec alone.",
                reason="model_is_sharded",
                module_path=path,
                what_to_do=if_sharded_alone,
            )
    if group is not None:
        refuse_destroyed(group, error)
        begin_on_all_ranks(sharded, call)
    return group
