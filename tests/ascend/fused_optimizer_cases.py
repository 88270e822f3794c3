"""The fused step with every rule, on rows that lie in one chunk of positions, in several, and in all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from recfx.kernels.build.tiling import step_rows
from recfx.optim.fused_step_op import rules_in_triton
from recfx.optim.rules.rule import Rule
from tests.ascend.kernel_case import DTYPES, Call, KernelCase, Place, from_first

_KERNELS = "recfx.kernels.step.fused_step_triton:"
_OF_BATCH = {
    "lengths_ptr": "*i64", "scales_ptr": "*fp32", "gradients_ptr": "*fp32", "first_columns_ptr": "*i32",
}  # fmt: skip


def _of_tables(weights: str, ways: tuple[str, ...]) -> dict[str, str]:
    """The parameters for tables of one dtype; ``ways``: how the pointers are called that a kernel writes through."""
    signature = {"tables_ptr": "*i32", "row_starts_ptr": "*i64", "dims_ptr": "*i32"}
    starts = ("weight_starts_ptr", "first_starts_ptr", "second_starts_ptr")
    for name, kind, start in zip(("weights", "first", "second"), (weights, "fp32", "fp32"), starts, strict=True):
        pointers = (f"{name}_ptr", *(f"new_{name}{way}_ptr" for way in ways))
        signature |= dict.fromkeys(pointers, f"*{kind}") | {start: "*i64"}
    return signature | {"parts_ptr": "*fp32"}


_OF_RULE = (
    "learning_rate", "weight_decay", "eps", "first_share", "second_beta", "second_share", "second_correction",
)  # fmt: skip
_TOLERANCES = {"fp32": (1e-5, 1e-6), "fp16": (2.0**-9, 1e-4), "bf16": (2.0**-6, 1e-3)}
GROUP = {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
STEP = 3
ROWS = (7, 5, 9)
TABLES = (0, 1, 0, 2)
"""Of each feature: two features share the first table."""
ABOUT_A_BLOCK = ((8, 7, 9, 16, 1, 17, 8), (1, 8, 8, 2, 16), (1, 1, 2, 9, 7, 8, 1, 3, 8))
"""How many positions each row of each table has: some end where a block does, or one before or after."""


def cases() -> list[KernelCase]:
    """Each rule in every dtype, in blocks from 4 to 1,024 columns, and without weight decay; both kernels of a step."""
    forms = [("fp32", 64, True, False), ("fp16", 64, False, True), ("bf16", 64, False, False)]
    forms += [("fp32", block, False, False) for block in (4, 16, 512, 1024)]
    made = [_step_case(rule, *form) for rule in rules_in_triton() for form in forms]
    made += [_step_case(rule, "fp32", 64, False, False, decays=False) for rule in rules_in_triton()]
    made += [_border_case(rule, dtype, 64) for rule in rules_in_triton() for dtype in DTYPES]
    made += [_border_case(rule, "fp32", 64, decays=False) for rule in rules_in_triton()]
    return made + [_with_keys(case, bits) for case, bits in zip(made[-1:-3:-1] + made[:2], (16, 32) * 2, strict=True)]


def _with_keys(case: KernelCase, bits: int) -> KernelCase:
    """A case with keys as a GPU sorts them."""

    def call(make: Any, place: Place) -> Call:
        made = make(place)
        keys, *others = made.arguments
        return replace(made, arguments=[keys.to({16: torch.int16, 32: torch.int32}[bits]), *others])

    calls = {label: partial(call, make) for label, make in case.calls.items()}
    signature = {**case.signature, "keys_ptr": f"*i{bits}"}
    return replace(case, name=f"{case.name}-on_gpu-i{bits}", signature=signature, calls=calls, on_gpu=True)


def _step_case(rule: Rule, dtype: str, block: int, weighted: bool, mean: bool, decays: bool = True) -> KernelCase:
    signature = {"keys_ptr": "*i64", "bags_ptr": "*i32", **_OF_BATCH, **_of_tables(dtype, ("_0", "_1", "_2", "_3"))}
    signature |= {"num_positions": "i32", "batch_size": "i32", "num_columns": "i32"} | dict.fromkeys(_OF_RULE, "fp32")
    build = partial(_step_call, rule=rule, dtype=dtype, block=block, weighted=weighted, mean=mean, decays=decays)
    constexprs = {"BLOCK_D": block, "ROWS": step_rows(block), "WEIGHTED": weighted, "MEAN": mean, "DECAYS": decays}
    constexprs |= _constexprs_of(rule)
    flags = [*["weighted"] * weighted, *["mean"] * mean, *["undecayed"] * (not decays)]
    name = "-".join(["fused_step", rule.name, dtype, f"block_{block}", *flags])
    return KernelCase(name, _KERNELS + "recfx_fused_step", signature, constexprs, _calls(build, decays), programs=5)


def _border_case(rule: Rule, dtype: str, block: int, decays: bool = True) -> KernelCase:
    signature = {"keys_ptr": "*i64", "bags_ptr": "*i32", **_of_tables(dtype, ("",))}
    signature |= {"num_positions": "i32", "num_chunks": "i32", "batch_size": "i32"} | dict.fromkeys(_OF_RULE, "fp32")
    build = partial(_border_call, rule=rule, dtype=dtype, block=block, decays=decays)
    constexprs = {"BLOCK_D": block, "DECAYS": decays, **_constexprs_of(rule)}
    name = "-".join(["fused_step_of_borders", rule.name, dtype, f"block_{block}", *["undecayed"] * (not decays)])
    return KernelCase(
        name, _KERNELS + "recfx_fused_step_of_borders", signature, constexprs, _calls(build, decays), programs=3
    )


def _constexprs_of(rule: Rule) -> dict[str, Any]:
    step = f"recfx.optim.rules.{rule.name}_triton:step"
    return {"STEP": step, "STATES": len(rule.states), "FIRST_IS_PER_ROW": rule.has_row_state}


def _calls(build: Any, decays: bool) -> dict[str, Any]:
    if not decays:
        return {
            "ordinary": partial(build, batch_size=4, longest=5),
            "infinite weights": partial(build, batch_size=4, longest=5, infinite=True),
        }
    return {
        "ordinary": partial(build, batch_size=4, longest=5),
        "one hot row": partial(build, batch_size=9, longest=9, hot=True),
        "one id": partial(build, batch_size=1, longest=1),
        "no ids": partial(build, batch_size=2, longest=0),
        "most ids without a row": partial(build, batch_size=9, longest=9, absent=True),
        "runs of about a block": partial(build, batch_size=9, longest=9, of_rows=ABOUT_A_BLOCK),
    }


@dataclass(frozen=True)
class _Run:
    """Positions of one chunk that looked up one row, in order."""

    chunk: int
    key: int
    positions: range
    began_earlier: bool
    goes_on: bool


def _runs(keys: list[int], chunks: int) -> Iterator[_Run]:
    size = -(-len(keys) // chunks)
    for chunk in range(chunks):
        begin, end = min(chunk * size, len(keys)), min((chunk + 1) * size, len(keys))
        while begin < end:
            last = begin
            while last + 1 < end and keys[last + 1] == keys[begin]:
                last += 1
            began_earlier = begin > 0 and keys[begin - 1] == keys[begin]
            goes_on = last + 1 < len(keys) and keys[last + 1] == keys[begin]
            yield _Run(chunk, keys[begin], range(begin, last + 1), began_earlier, goes_on)
            begin = last + 1


class _Problem:
    """A batch on three tables, the positions sorted by row, and the reference's step."""

    def __init__(
        self, place: Place, rule: Rule, dtype: str, block: int, batch_size: int, longest: int, hot: bool,
        weighted: bool = False, mean: bool = False, decays: bool = True,
        infinite: bool = False, absent: bool = False, of_rows: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(block + batch_size)
        self.rule, self.block, self.batch_size = rule, block, batch_size
        self.group = GROUP if decays else {**GROUP, "weight_decay": 0.0}
        self.dims = [block, max(1, block * 3 // 4), max(1, block // 2 + 1)]
        self.lengths = torch.randint(int(longest == 1), longest + 1, (len(TABLES) * batch_size,), generator=draw)
        bags = torch.repeat_interleave(torch.arange(self.lengths.numel()), self.lengths)
        tables = torch.tensor(TABLES)[bags // batch_size]
        rows = (torch.rand(bags.numel(), generator=draw) * (torch.tensor(ROWS)[tables] + 1)).long() - 1
        if hot:
            rows = torch.where((tables == 0) & (rows >= 0), 3, rows)
        if absent:  # runs of them go across borders of chunks
            rows = torch.where(torch.rand(rows.numel(), generator=draw) < 0.6, -1, rows)
        for table, counts in enumerate(of_rows):
            places = (tables == table).nonzero().flatten()
            repeated = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
            rows[places] = -1
            rows[places[torch.randperm(places.numel(), generator=draw)][: repeated.numel()]] = repeated[
                : places.numel()
            ]
        self.row_starts = torch.tensor([0, *ROWS[:-1]]).cumsum(0)
        keys = torch.where(rows >= 0, self.row_starts[tables] + rows, -1)
        self.keys, order = keys.sort(stable=True)
        self.bags = bags[order].to(torch.int32)
        self.scales = torch.rand(bags.numel(), generator=draw)
        if absent:
            self.scales[self.keys < 0] = torch.nan
        self.widths = [self.dims[table] for table in TABLES]
        self.columns = torch.tensor([0, *self.widths]).cumsum(0)
        self.gradients = torch.randn(batch_size, int(self.columns[-1]), generator=draw)
        self.by_position = [self._gradient_at(i, weighted, mean) for i in range(bags.numel())]
        self.drawn_weights = [
            torch.randn(count, dim, generator=draw).to(DTYPES[dtype])
            for count, dim in zip(ROWS, self.dims, strict=True)
        ]
        if infinite:
            for weight in self.drawn_weights:
                weight[1::2] = float("inf")
        self.drawn_states = [
            [torch.rand(state.shape(count, dim), generator=draw) for state in rule.states]
            for count, dim in zip(ROWS, self.dims, strict=True)
        ]
        self.weights = [place(weight) for weight in self.drawn_weights]
        self.states = [[place(state) for state in of_table] for of_table in self.drawn_states]

    def _gradient_at(self, position: int, weighted: bool, mean: bool) -> torch.Tensor:
        feature, sample = divmod(int(self.bags[position]), self.batch_size)
        gradient = self.gradients[sample, self.columns[feature] : self.columns[feature + 1]]
        if mean:
            gradient = gradient / self.lengths[self.bags[position]]
        return gradient * self.scales[position] if weighted else gradient

    def sum_of(self, positions: range) -> torch.Tensor:
        total = torch.zeros_like(self.by_position[positions[0]])
        for position in positions:
            total = total + self.by_position[position]
        return total

    def stepped(self, sums: dict[int, torch.Tensor]) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Weights and states of all tables after the reference's step of some rows, given by key."""
        weights = [weight.clone() for weight in self.drawn_weights]
        states = [[state.clone() for state in of_table] for of_table in self.drawn_states]
        for key, gradient in sums.items():
            table = int(torch.searchsorted(self.row_starts, key, right=True)) - 1
            row = key - int(self.row_starts[table])
            names = [state.name for state in self.rule.states]
            row_states = {name: states[table][i][row : row + 1].clone() for i, name in enumerate(names)}
            values = weights[table][row : row + 1].float()
            weights[table][row] = self.rule.update(values, gradient[None], row_states, STEP, self.group)[0].to(
                weights[table].dtype
            )
            for i, name in enumerate(names):
                states[table][i][row] = row_states[name][0]
        return weights, states

    def of_tables(self, place: Place, parts: torch.Tensor, ways: int) -> list[Any]:
        """The arguments for tables; each is given once to be read and ``ways`` times to be written."""
        arguments = [place(torch.tensor(TABLES, dtype=torch.int32)), place(self.row_starts)]
        arguments.append(place(torch.tensor(self.dims, dtype=torch.int32)))
        empty = place(torch.zeros(1))
        firsts, seconds = ([of[i] if len(of) > i else empty for of in self.states] for i in (0, 1))
        for tensors in (self.weights, firsts, seconds):
            arguments += [tensors[0]] * (1 + ways) + [place(from_first(tensors))]
        return [*arguments, parts]

    def call(self, arguments: list[Any], expected: dict[str, torch.Tensor], sums: dict[int, torch.Tensor]) -> Call:
        weights, states = self.stepped(sums)
        tensors = [*self.weights, *(state for of_table in self.states for state in of_table)]
        stepped = [*weights, *(state for of_table in states for state in of_table)]
        dtype = next(name for name, dtype in DTYPES.items() if dtype == self.weights[0].dtype)
        rtol, atol = _TOLERANCES[dtype]
        return Call(arguments, expected, rtol, atol, also=tuple(zip(tensors, stepped, strict=True)))


def _numbers(rule: Rule, decay: float) -> list[float]:
    first_beta, second_beta = GROUP["betas"]
    is_adam = rule.name == "adam"
    rate = GROUP["lr"] / (1 - first_beta**STEP) if is_adam else GROUP["lr"]
    correction = (1 - second_beta**STEP) ** 0.5
    return [rate, decay, GROUP["eps"], 1 - first_beta, second_beta, 1 - second_beta, correction]


def _step_call(
    place: Place, rule: Rule, dtype: str, block: int, weighted: bool, mean: bool, batch_size: int, longest: int,
    hot: bool = False, decays: bool = True, infinite: bool = False, absent: bool = False,
    of_rows: Sequence[Sequence[int]] = (),
) -> Call:  # fmt: skip
    problem = _Problem(
        place, rule, dtype, block, batch_size, longest, hot, weighted, mean, decays, infinite, absent, of_rows
    )
    expected = torch.full((5, 2, block), -1.0)
    sums = {}
    for run in _runs(problem.keys.tolist(), chunks=5):
        if run.key < 0:
            continue
        gradient = problem.sum_of(run.positions)
        if run.began_earlier or run.goes_on:
            expected[run.chunk, 0 if run.began_earlier else 1, : gradient.numel()] = gradient
        else:
            sums[run.key] = gradient
    parts = place(torch.full((5, 2, block), -1.0))
    arguments = [
        place(problem.keys), place(problem.bags), place(problem.lengths), place(problem.scales),
        place(problem.gradients), place(problem.columns.to(torch.int32)), *problem.of_tables(place, parts, ways=4),
        problem.keys.numel(), batch_size, int(problem.columns[-1]), *_numbers(rule, problem.group["weight_decay"]),
    ]  # fmt: skip
    return problem.call(arguments, {"parts_ptr": expected}, sums)


def _border_call(
    place: Place, rule: Rule, dtype: str, block: int, batch_size: int, longest: int, hot: bool = False,
    decays: bool = True, infinite: bool = False, absent: bool = False, of_rows: Sequence[Sequence[int]] = (),
) -> Call:  # fmt: skip
    problem = _Problem(
        place, rule, dtype, block, batch_size, longest, hot,
        decays=decays, infinite=infinite, absent=absent, of_rows=of_rows,
    )  # fmt: skip
    chunks = 5
    parts = torch.full((chunks, 2, block), float("nan"))
    sums: dict[int, torch.Tensor] = {}
    for run in _runs(problem.keys.tolist(), chunks):
        if run.key < 0 or not (run.began_earlier or run.goes_on):
            continue
        gradient = problem.sum_of(run.positions)
        parts[run.chunk, 0 if run.began_earlier else 1, : gradient.numel()] = gradient
        sums[run.key] = sums[run.key] + gradient if run.key in sums else gradient
    arguments = [
        place(problem.keys), place(problem.bags), *problem.of_tables(place, place(parts), ways=1),
        problem.keys.numel(), chunks, batch_size, *_numbers(rule, problem.group["weight_decay"]),
    ]  # fmt: skip
    return problem.call(arguments, {}, sums)
