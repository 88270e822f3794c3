"""Records where the host or the AI CPU is involved in what runs on an NPU.

The host is judged by torch_npu's dispatch table, the AI CPU by dtypes: see ``engines.py``.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from recfx.kernels.build import launch, library
from recfx.kernels.index import find_rows
from recfx.kernels.lookup import bag_offsets
from recfx.kernels.route import select_keys
from recfx.kernels.route.bucketize import bucketize_triton
from recfx.kernels.step import row_initialization
from recfx.lowering.triton import npu
from recfx.lowering.triton import target as triton_lookup
from tests.ascend.npu_runtime import engines
from tests.ascend.npu_runtime.round_trips import (
    AI_CPU,
    COPY,
    FALLBACK,
    INSIDE,
    UNKNOWN,
    WAITS,
    Meeting,
    Moment,
    Occasion,
)
from tests.ascend.tools import ROOT

# The table of dispatch says "kernel", but that kernel copies everything to the host, computes there and copies back.
_COPY_INSIDE = frozenset({"aten::_embedding_bag_per_sample_weights_backward"})
# Their results are as long as the data say.
_WAIT = frozenset(
    f"aten::{name}" for name in ("_unique2", "unique_consecutive", "unique_dim", "nonzero", "masked_select", "bincount")
)
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
# Operators whose result is a number of Python's.
_ANSWER = frozenset({"aten::_local_scalar_dense", "aten::equal"})


def served_by(operator: str) -> str:
    """How torch_npu serves an operator: ``kernel``, ``default backend kernel``, ``backend fallback``, ..."""
    lines = torch._C._dispatch_dump_table(operator).splitlines()
    return next((line.rpartition("[")[2].rstrip("]") for line in lines if line.startswith("PrivateUse1:")), "")


class Recorder(TorchDispatchMode):
    """Records operators that are called with tensors on an NPU, or make some.

    Args:
        allowed: operators that run on the host and were given a kernel for the simulation, so that the table of
            dispatch does not tell.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        super().__init__()
        self._allowed = allowed
        self.now: Moment | None = None
        self.operators: set[str] = set()
        self.seen: defaultdict[Meeting, set[Moment]] = defaultdict(set)
        self.calls: Counter[Meeting] = Counter()  # of those with the host, in this process
        self.lines: dict[Meeting, str] = {}
        self.launches: defaultdict[Moment, Counter[str]] = defaultdict(Counter)  # what the host starts on the NPU
        self.waits: defaultdict[Moment, Counter[str]] = defaultdict(Counter)  # what the host waits for

    def __enter__(self) -> Recorder:
        self._patches = ExitStack()
        self._patches.enter_context(patch.object(library, "operators", _AsFunctions))
        self._patches.enter_context(patch.object(launch, "launch", self._counting(launch.launch)))
        for waits_for in (torch.npu.Event, torch.npu.Stream, torch.npu):
            waiting = self._waiting(waits_for.synchronize)
            self._patches.enter_context(patch.object(waits_for, "synchronize", waiting))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _counting(self, launched: Callable[..., None]) -> Callable[..., None]:
        def count(kernel: Any, *arguments: Any, **constants: Any) -> None:
            if self.now:
                self.launches[self.now][kernel.fn.__name__] += 1
            launched(kernel, *arguments, **constants)

        return count

    def _waiting(self, synchronize: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any) -> Any:
            if self.now:
                self.waits[self.now]["synchronize"] += 1
            return synchronize(*arguments)

        return wait

    @property
    def meetings(self) -> dict[Meeting, Occasion]:
        """Where the host or the AI CPU was involved, and when."""
        return {meeting: Occasion.of(seen) for meeting, seen in self.seen.items()}

    def add(self, operators: set[str], seen: Mapping[Meeting, set[Moment]], lines: Mapping[Meeting, str]) -> None:
        """Take over what the recorder of another process has seen."""
        self.operators |= operators
        self.lines |= lines
        for meeting, moments in seen.items():
            self.seen[meeting] |= moments

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _devices((args, kwargs)), _devices(result)  # of an argument that is written to: as it was
        if self.now and "npu" in given | made:
            self.operators.add(func.name())
            self.launches[self.now][func.name()] += _starts_something(func)
            how = self._how(func.name(), given, made)
            if how is None and _length_is_data(func.name(), args, kwargs or {}):
                how = WAITS
            if how:
                self.calls[self._saw(self.now, func.name(), how)] += 1
            is_copy = func.name() in _COPIES and "cpu" in given | made
            waits = not _is_non_blocking(args, kwargs or {}) if is_copy else how is not None
            self.waits[self.now][func.name()] += waits
            if how in (None, WAITS) and not (func.name() in _COPIES and "cpu" in given | made):
                slow = _not_on_ai_cores(func, args, kwargs or {}, result)
                if slow:
                    self._saw(self.now, func.name(), slow)
        return result

    def _saw(self, now: Moment, operator: str, how: str) -> Meeting:
        path, line = _where(sys._getframe(1))
        meeting = Meeting(operator, how, path)
        self.seen[meeting].add(now)
        self.lines.setdefault(meeting, f"{path}:{line}")
        return meeting

    def _how(self, name: str, given: set[str], made: set[str]) -> str | None:
        if served_by(name) == "backend fallback" or name in self._allowed:
            return FALLBACK
        if name in _COPY_INSIDE:
            return INSIDE
        if name in _WAIT:
            return WAITS
        return COPY if "npu" in given and (name in _ANSWER or "cpu" in made) else None


class _AsFunctions:
    """recfx's operators, which run on NPUs as the functions that they are: no mode sees what runs inside operators."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(torch.ops.recfx, name)

        def run(*arguments: Any) -> Any:
            if "npu" not in _devices(arguments):
                return operator(*arguments)
            return (bucketize_triton if name == "bucketize" else library.REFERENCES[name])(*arguments)

        return run


def _is_non_blocking(args: Any, kwargs: Any) -> bool:
    """Whether a copy is not waited for: ``copy_`` has it as its third argument."""
    return bool(kwargs.get("non_blocking") or args[2:3] == (True,))


def _length_is_data(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the result of this call is as long as the data say; that of others with the same operator may not be."""
    if name in ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    repeats = ("aten::repeat_interleave.Tensor", "aten::repeat_interleave.self_Tensor")
    return name in repeats and kwargs.get("output_size") is None


def _not_on_ai_cores(func: Any, args: Any, kwargs: Any, result: Any) -> str:
    """How a call ran, with its dtypes, unless on an AI Core or without any kernel."""
    given, made = _dtypes((args, kwargs)), _dtypes(result)
    engine = engines.engine(func.name(), given, made)
    dtypes = " -> ".join(", ".join(dict.fromkeys(names)) for names in (given, made))
    if engine == engines.AI_CPU:
        return AI_CPU + dtypes
    gaps = any(not tensor.is_contiguous() for tensor in _written(func, args, kwargs))
    return f"{UNKNOWN}{dtypes}{', into a strided view' * gaps}" if gaps or engine == engines.UNKNOWN else ""


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield kwargs[argument.name] if argument.name in kwargs else args[position]


def _starts_something(operator: Any) -> bool:
    """Whether it is neither a view (an "unsafe" one among them) nor memory that is only allocated."""
    results = [value.alias_info for value in operator._schema.returns]
    is_view = bool(results) and all(result is not None and not result.is_write for result in results)
    return not is_view and not operator.name().startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view"))


def _dtypes(values: Any) -> list[str]:
    on_npu = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.device.type == "npu")
    return [str(tensor.dtype).removeprefix("torch.") for tensor in on_npu]


def _devices(values: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def _where(frame: FrameType | None) -> tuple[str, int]:
    """The innermost file of recfx that was running, and its line."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/recfx/"):
            return path.removeprefix(f"{ROOT}/"), frame.f_lineno
        frame = frame.f_back
    return "autograd", 0


@contextmanager
def launching_nothing(target: str = "npu") -> Iterator[None]:
    """Let one form of target ``npu`` serve, and do everything that it does around kernels in Triton, which are not
    launched.

    Results are whatever was in memory, and nothing here depends on them, except that batches are checked, that ids are
    routed, all of them to the first piece of their table, as id 0, and that rows are found.
    The operators with kernels are called as the functions that they are, because no dispatch mode sees what runs inside
    an operator.
    """
    operators = (
        (triton_lookup, "pooled_lookup_triton"),
        (triton_lookup, "per_sample_weight_gradients_triton"),
        (triton_lookup, "fused_step_triton_"),
        (find_rows, "find_rows_triton"),
        (row_initialization, "init_rows_triton_"),
        (bag_offsets, "bag_offsets_triton"),
        (select_keys, "select_keys_triton"),
    )
    with ExitStack() as patches:
        for name, answer in (("why_not", ""), ("is_possible", True)):
            patches.enter_context(patch.object(launch, name, lambda *_, _answer=answer, **__: _answer))
        patches.enter_context(patch.object(launch, "launch", _route))
        patches.enter_context(patch.object(npu, "measured", lambda *_: int(target != "npu")))
        for module, name in operators:
            patches.enter_context(patch.object(module, name, getattr(module, name)._init_fn))
        yield


def _route(kernel: Any, programs: int, ids: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    with _disable_current_modes():  # these stand for a kernel, and are none of the graph's operators
        _answer(kernel.fn.__name__, ids, *arguments, **constants)


def _answer(name: str, ids: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    if name == "recfx_bucket_counts":
        offsets, _, _, pieces, counts, outside = arguments[:6]
        pieces.zero_()
        counts.zero_()
        counts[:, 0] = offsets.diff()
        outside.fill_(ids.numel())
    elif name == "recfx_bucket_scatter":
        new_ids = arguments[8]
        new_ids.zero_()
    elif name == "recfx_find_rows":
        given, (rows, absent) = [tensor.cpu() for tensor in (ids, *arguments[:4])], arguments[4:6]
        found_rows, counts = find_rows.find_rows_reference(*given[:2], find_rows.ReadIndexes(*given[2:]))
        rows.copy_(found_rows)
        absent[0].copy_(counts)
    elif name == "recfx_bag_offsets":
        _, values, first_bags, limits, offsets, reports = arguments[:6]
        per_key = first_bags.diff().tolist()
        bag_starts, said = bag_offsets.kernel_reference(values, ids, constants["ARE_OFFSETS"], per_key, limits.tolist())
        offsets.copy_(bag_starts)
        reports.zero_()[: len(per_key) + 1] = said[:-1]
    elif name == "recfx_select_keys":
        weights, offsets, positions, *made = arguments[:6]
        batch_size, count = arguments[7:9]
        given = (ids, offsets, positions.tolist(), batch_size, count, weights if constants["WEIGHTED"] else None)
        new_ids, new_offsets, new_weights = select_keys.select_keys_reference(*given)
        for tensor, expected in zip(made, (new_ids, new_weights, new_offsets), strict=True):
            tensor.copy_(expected)
