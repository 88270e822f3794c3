"""The operators of the kernels in Triton: which kernels they launch; ``on_device`` has ``opcheck``."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from recfx.commandline.doctor.cases import GROUP, LookupCase
from recfx.kernels.build import launch
from recfx.kernels.build.tuned import ALLOWED, PROGRAMS_PER_CORE
from recfx.kernels.index.find_rows import IndexFacts, find_rows_triton
from recfx.kernels.lookup.bag_offsets import bag_offsets_triton
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_triton
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import quantize_rows
from recfx.kernels.route.bucketize import bucketize_triton
from recfx.kernels.route.select_keys import select_keys_triton
from recfx.kernels.step.row_initialization import init_rows_triton_
from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from recfx.optim.rules.rule import Rule


def states_of(rule: Rule, weights: list[Tensor]) -> list[list[Tensor]]:
    return [[torch.rand(state.shape(*weight.shape)) for weight in weights] for state in rule.states]


def arguments_of(case: LookupCase, rule: Rule, states: list[list[Tensor]], is_stepped: list[bool], mean: bool) -> Any:
    first, second = (*states, [], [])[:2]
    numbers = list(rule.step_numbers(3.0, GROUP))
    of_rule = (triton_module(rule), rule.has_row_state, numbers)
    tables = (case.weights, first, second, case.table_of_feature, is_stepped)
    return (case.rows, case.offsets, case.gradients, *tables, *of_rule, mean, None)


_NO_INDEX = IndexFacts.without_index()


LAUNCHED = {
    "pooled": "pooled_lookup*",
    "unpooled": "gather_rows*",
    "scale": "per_sample_weight_gradients*",
    "step": "step_digits* fused_step fused_step_of_borders",
    "quantized": "quantized_lookup",  # rows of 9 and 12 bytes, of which not all are whole words
    "words": "quantized_lookup*",
    "bucketize": "bucket_counts* bucket_scatter*",
    "find": "find_rows*",
    "initialize": "initialize_rows",
    "bags": "bag_offsets",
    "select": "select_keys",
}
"""The kernels of each operator; those with a star have a form for GPUs."""


@pytest.mark.parametrize("suffix", ["", "_on_gpu"])
@pytest.mark.parametrize("name", LAUNCHED)
def test_operators_launch_their_kernels(name: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reference took their place, its answers would be as right; programs are as many as were measured."""
    torch.manual_seed(0)
    operator, arguments = calls()[name.replace("words", "quantized")]
    if name == "words":
        rows, offsets, tables, dims, *rest = arguments
        tables = [quantize_rows(torch.rand(table.shape[0], dim), 8, 4) for table, dim in zip(tables, dims, strict=True)]
        arguments = (rows, offsets, tables, dims, *rest)
    in_place = copy.deepcopy(arguments)
    expected, launched, asked, real, number = operator(*arguments), [], [], launch.launch, launch.programs

    def noting_name(device: torch.device, work: int, kernel: str = "") -> int:
        asked.append(kernel)
        return number(device, work, kernel)

    def noting(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__.removeprefix("recfx_"))
        real(kernel, *arguments, **constants)

    monkeypatch.setattr(launch, "launch", noting)
    monkeypatch.setattr(launch, "programs", noting_name)
    monkeypatch.setattr(launch, "takes_gpu_forms", lambda device: bool(suffix))
    torch.testing.assert_close(operator(*in_place), expected)
    torch.testing.assert_close([in_place[3:6]], [arguments[3:6]], rtol=0, atol=0)
    assert launched == LAUNCHED[name].replace("*", suffix).split()
    assert {f"recfx_{kernel}" for kernel in launched} & set(ALLOWED[PROGRAMS_PER_CORE]) <= set(asked)


def strided(value: Any) -> Any:
    """The same numbers with others in between."""
    if isinstance(value, list):
        return [strided(one) for one in value]
    return torch.stack([value, value + 1], -1)[..., 0] if isinstance(value, Tensor) else value


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each operator of a kernel, and arguments."""
    case, rule = LookupCase([5, 8], 3), next(rule for rule in rules_in_triton() if len(rule.states) == 2)
    entries, nothing = torch.tensor([[0, 7, 0], [2, 9, 1]]), torch.empty(0, 0)
    facts = torch.tensor([[*_NO_INDEX], [*_NO_INDEX]])
    tables = [quantize_rows(weight, 8) for weight in case.weights]
    ids, lengths = torch.tensor([9, 3, 4]), torch.tensor([2, 1])
    weights, states = [torch.rand(4, 5), torch.rand(4, 8)], [torch.rand(4, 1), torch.rand(4, 8)]
    routes = ([0, 4, 10], [3], [0], [10], [0], [0], [0, 0], [0, 1])
    of_values = ([5, 6], [0, 0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.5], [0.0, 0.0])
    features = case.table_of_feature
    return {
        "pooled": (pooled_lookup_triton, (case.rows, case.offsets, case.weights, features, False, case.scales)),
        "unpooled": (pooled_lookup_triton, (case.rows, case.borders, case.weights[:1], [0, 0, 0], False, None, True)),
        "scale": (
            per_sample_weight_gradients_triton, (case.rows, case.offsets, case.gradients, case.weights, features)
        ),
        "step": (fused_step_triton_, arguments_of(case, rule, states_of(rule, case.weights), [True, True], False)),
        "quantized": (
            quantized_lookup_triton, (case.rows, case.offsets, tables, case.dims, 8, features, False, case.scales)
        ),
        "bucketize": (bucketize_triton, (ids, lengths, 2, *routes, torch.rand(3))),
        "find": (
            find_rows_triton,
            (ids, torch.tensor([1, 3]), torch.empty(0, 2, dtype=torch.int64), torch.tensor([-1, -1]), facts),
        ),
        "initialize": (init_rows_triton_, (entries, weights, states, [nothing, nothing], *of_values)),
        "bags": (bag_offsets_triton, (ids, lengths, False, [1, 1], [10, 10])),
        "select": (select_keys_triton, (ids, torch.tensor([0, 2, 3]), [1, 0], 1, 3, torch.rand(3))),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_strided_arguments(name: str) -> None:
    torch.manual_seed(0)
    operator, arguments = calls()[name]
    apart = tuple(map(strided, arguments))
    expected, actual = operator(*arguments), operator(*apart)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for written, expected in zip(apart, arguments, strict=True):  # in place
        if isinstance(expected, (list, Tensor)):
            torch.testing.assert_close(written, expected, rtol=0, atol=0)
