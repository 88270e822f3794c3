"""Both targets against each other and against autograd and torch.optim on the whole table."""

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recfx.errors import InputError
from recfx.hashing import HashConfig
from recfx.ir import TableSpec
from recfx.kernels.build import library
from recfx.lowering import cpu, fbgemm, reference
from recfx.lowering.registry import BACKENDS, LookupBatch, LookupSpec, select_backend
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import RULES
from tests.support.refusals import refused

ROWS, DIMS = (30, 20, 10), (8, 12, 4)
FEATURES = (("a", "b"), ("c",), ("d",))
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # tests/ascend runs this file so
NAMES = ["cpu", "fbgemm", "reference", *(["triton"] if IS_INTERPRETED else [])]
TARGETS = {backend.name: backend for backend in BACKENDS if backend.name in NAMES}
HAVE_ADAM = ("cpu", "reference", "triton")
RULE = {rule.name: rule for rule in RULES}
SETTINGS = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.1, "eps": 1e-3},
    "rowwise_adagrad": {"lr": 0.1, "eps": 1e-3},
    "adam": {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99)},
}
DENSE = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adam": torch.optim.Adam,
}


def tables(pooling: str) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(f"t{number}", names, names, rows, dim, pooling, HashConfig().resolve(rows, adopt=True), 0.0, 0.0)
        for number, (names, rows, dim) in enumerate(zip(FEATURES, ROWS, DIMS, strict=True))
    )


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(rows, dim).to(dtype)) for rows, dim in zip(ROWS, DIMS, strict=True)]


def fused(kind: str, **settings: Any) -> list[FusedOptimizer]:
    """An optimizer for each table."""
    return [FusedOptimizer(RULE[kind], {**SETTINGS[kind], **settings}) for _ in ROWS]


def sums(on: list[torch.Tensor], optimizers: Any = (None, None, None)) -> LookupSpec:
    """A lookup that adds the rows of these tables."""
    return LookupSpec(tables("SUM"), "SUM", False, on, list(optimizers))


def batch(batch_size: int, longest: int, weighted: bool) -> LookupBatch:
    lengths = torch.randint(0, longest + 1, (4 * batch_size,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows_of_feature = (30, 30, 20, 10)
    values = [
        torch.randint(0, rows, (int(offsets[(f + 1) * batch_size] - offsets[f * batch_size]),))
        for f, rows in enumerate(rows_of_feature)
    ]
    ids = torch.cat(values)
    return LookupBatch(ids, offsets, torch.rand(ids.numel(), requires_grad=True) if weighted else None, batch_size)


def standard(spec: LookupSpec, data: LookupBatch, on: list[torch.Tensor]) -> torch.Tensor:
    """One functional.embedding_bag a feature: the standard collection's forward."""
    pooled, feature = [], 0
    for table, described in zip(on, spec.tables, strict=True):
        for _ in described.feature_names:
            first = feature * data.batch_size
            bags = data.offsets[first : first + data.batch_size + 1]
            ids = slice(int(bags[0]), int(bags[-1]))
            scale = data.per_sample_weights
            pooled.append(
                nn.functional.embedding_bag(
                    data.values[ids],
                    table.float(),
                    bags - bags[0],
                    mode=spec.combine.lower(),
                    per_sample_weights=None if scale is None else scale[ids],
                    include_last_offset=True,
                )
            )
            feature += 1
    return torch.cat(pooled, dim=1)


CASES = [
    pytest.param(
        pooling, weighted, dtype, size, longest, tolerance, id=f"{pooling}-{weighted}-{dtype}-{size}-{longest}"
    )
    for (pooling, weighted), (dtype, tolerance), (size, longest) in itertools.product(
        [("SUM", False), ("MEAN", False), ("SUM", True)],
        [(torch.float32, 1e-5), (torch.float16, 1e-2)],
        [(5, 4), (3, 0), (0, 4), (1, 50)],
    )
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("pooling", "weighted", "dtype", "size", "longest", "tolerance"), CASES)
def test_outputs_and_gradients(
    target: str, pooling: str, weighted: bool, dtype: torch.dtype, size: int, longest: int, tolerance: float
) -> None:
    ours = weights(dtype)
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    spec = LookupSpec(tables(pooling), pooling, weighted, ours, [None] * 3)
    assert TARGETS[target].decline(spec) is None
    data = batch(size, longest, weighted)
    (pooled,) = TARGETS[target].build(spec)(ours, data)
    cotangent = torch.randn(pooled.shape)
    pooled.backward(cotangent)
    gradient = None if data.per_sample_weights is None else data.per_sample_weights.grad.clone()
    if data.per_sample_weights is not None:
        data.per_sample_weights.grad = None
    expected = standard(spec, data, theirs)
    expected.backward(cotangent)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, expected, rtol=tolerance, atol=tolerance)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)
    if gradient is not None:
        torch.testing.assert_close(gradient, data.per_sample_weights.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("target", "kind"), [(t, k) for t in TARGETS for k in SETTINGS if t in HAVE_ADAM or k != "adam"]
)
@pytest.mark.parametrize(("pooling", "weighted"), [("SUM", False), ("MEAN", False), ("SUM", True)])
def test_three_fused_steps_are_the_dense_rule_on_touched_rows(
    target: str, kind: str, pooling: str, weighted: bool
) -> None:
    ours = weights(torch.float32)
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    spec = LookupSpec(tables(pooling), pooling, weighted, ours, fused(kind))
    assert TARGETS[target].decline(spec) is None
    kernel = TARGETS[target].build(spec)
    dense = [DENSE[kind]([weight], **SETTINGS[kind]) for weight in theirs]
    data = batch(6, 4, weighted)
    for step in range(3):
        if step and kind != "adam":  # dense Adam moves rows that a batch did not use
            data = batch(6, 4, weighted)
        cotangent = torch.randn(6, sum(dim * len(names) for dim, names in zip(DIMS, FEATURES, strict=True)))
        scale = data.per_sample_weights
        kernel(ours, data)[0].backward(cotangent)
        found_scale = None if scale is None else scale.grad.clone()
        if scale is not None:
            scale.grad = None
        standard(spec, data, theirs).backward(cotangent)
        for optimizer in dense:
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.grad is None
            torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-5, atol=1e-6)
        if scale is not None:
            torch.testing.assert_close(found_scale, scale.grad, rtol=1e-5, atol=1e-6)
            scale.grad = None


class _Made(TorchDispatchMode):
    """The shapes of the float32 tensors that are made, and have memory for all their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.shapes += [
            tensor.shape
            for tensor in tensors
            if tensor.dtype == torch.float32 and tensor.untyped_storage().nbytes() >= 4 * tensor.numel()
        ]
        return result


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "reference"])
@pytest.mark.parametrize("frozen", [[1], [0, 2]], ids=str)
def test_no_gradient_of_a_frozen_table_is_computed(target: str, frozen: list[int]) -> None:
    torch.manual_seed(0)
    ours = weights(torch.float32)
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    for table, on in itertools.product(frozen, (ours, theirs)):
        on[table].requires_grad_(False)
    spec = LookupSpec(tables("MEAN"), "MEAN", False, ours, [None] * 3)
    data = batch(5, 4, False)
    (output,) = TARGETS[target].build(spec)(ours, data)
    made = _Made()
    with made:
        output.square().sum().backward()
    standard(spec, data, theirs).square().sum().backward()
    for table, (weight, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert (weight.shape in made.shapes) == (table not in frozen)
        assert (weight.grad is None) == (table in frozen)
        if table not in frozen:
            torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_repeated_runs_give_identical_bits(target: str) -> None:
    data = batch(16 if target == "triton" else 64, 8, False)  # an interpreter takes a second for a hundred bags
    start = weights(torch.float32)
    runs = []
    for _ in range(2):
        ours = [nn.Parameter(weight.detach().clone()) for weight in start]
        (output,) = TARGETS[target].build(sums(ours, fused("adagrad", eps=1e-8)))(ours, data)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape))
        runs.append([output.detach(), *(weight.detach() for weight in ours)])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_fused_step_calls_little_python_per_table(kind: str) -> None:
    """A model has dozens of tables, and FBGEMM's Adagrad takes one kernel call for each of them."""
    few, many = _python_calls_of_a_step(kind, 2), _python_calls_of_a_step(kind, 12)
    assert many - few <= 8 * 10


def _python_calls_of_a_step(kind: str, number: int) -> int:
    names = [(f"f{table}",) for table in range(number)]
    adopted = HashConfig().resolve(10, adopt=True)
    described = tuple(
        TableSpec(f"t{table}", keys, keys, 10, 4, "SUM", adopted, 0.0, 0.0) for table, keys in enumerate(names)
    )
    ours: list[torch.Tensor] = [nn.Parameter(torch.randn(10, 4)) for _ in names]
    optimizers = [FusedOptimizer(RULE[kind], dict(SETTINGS[kind])) for _ in names]
    assert library.load()
    kernel = cpu.build(LookupSpec(described, "SUM", False, ours, optimizers))
    data = LookupBatch(torch.zeros(number, dtype=torch.int64), torch.arange(number + 1), None, 1)
    kernel(ours, data)[0].sum().backward()  # makes what stays
    output, calls = kernel(ours, data)[0].sum(), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # other libraries hang callbacks on a collection, which would be counted
    sys.setprofile(count)
    try:
        output.backward()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def test_the_tables_live_until_the_backward_has_run() -> None:
    ours = weights(torch.float32)
    kernel = fbgemm.build(sums(ours))
    (output,) = kernel(ours, batch(6, 4, False))
    copies = [weight.detach().clone() for weight in ours]
    del ours, kernel
    _ = [torch.full((rows, dim), float("nan")) for rows, dim in zip(ROWS, DIMS, strict=True) for _ in range(8)]
    output.sum().backward()
    assert all(torch.isfinite(copy).all() for copy in copies)


def negated(values: torch.Tensor) -> torch.Tensor:
    """A view that negates its memory, as the imaginary part of a conjugate is."""
    return (-values)._neg_view()


def one_byte_off(values: torch.Tensor) -> torch.Tensor:
    memory = bytearray(values.numel() * values.element_size() + 1)
    shifted = torch.frombuffer(memory, dtype=values.dtype, offset=1, count=values.numel()).view(values.shape)
    return shifted.copy_(values)


@contextlib.contextmanager
def refused_or_not(target: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if target != "triton" and getattr(error, "reason", "") != "backend_unusable":
            raise


@pytest.mark.parametrize("target", ["auto", *TARGETS])
@pytest.mark.parametrize("memory", [negated, one_byte_off])
@pytest.mark.parametrize("of_state", [False, True])
@pytest.mark.parametrize("kind", [None, "sgd", "adagrad"])
def test_memory_that_is_not_plain_is_read_right_or_refused(
    target: str, memory: Callable[[torch.Tensor], torch.Tensor], of_state: bool, kind: str | None
) -> None:
    plain, data = weights(torch.float32), batch(6, 4, False)
    after: list[Any] = []
    for changed in (False, True):
        ours = [nn.Parameter(weight.detach().clone()) for weight in plain]
        optimizers = [None] * 3 if kind is None else fused(kind)
        if kind == "adagrad":
            optimizers[1].state["sum"] = torch.full((ROWS[1], DIMS[1]), 0.5)
        if changed and not of_state:
            ours[1] = nn.Parameter(memory(plain[1].detach()))
        elif changed and kind == "adagrad":
            optimizers[1].state["sum"] = memory(optimizers[1].state["sum"])
        may_refuse = changed and target not in ("auto", "reference")
        with refused_or_not(target) if may_refuse else contextlib.nullcontext():
            (output,) = select_backend(sums(ours, optimizers), target, "").kernel(ours, data)
            output.square().sum().backward()
            after.append([output, *(weight.grad if kind is None else weight for weight in ours)])
    for results in after[1:]:
        torch.testing.assert_close(results, after[0])


def test_settings_and_states_as_files_give_them_are_made_ready_for_the_kernel() -> None:
    """Lists for tuples, another dtype, and a state without its number of steps; all between two steps."""
    ours = weights(torch.float32)
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    data = batch(6, 4, False)
    for target, of_tables in ((cpu, ours), (reference, theirs)):
        on = fused("adam")
        of_kernel = target.build(sums(of_tables, on))
        of_kernel(of_tables, data)[0].sum().backward()
        for optimizer in on:
            del optimizer.state["step"]
            optimizer.state["exp_avg"] = optimizer.state["exp_avg"].double()
            optimizer.group["betas"] = list(optimizer.group["betas"])
        of_kernel(of_tables, data)[0].sum().backward()
        of_kernel(of_tables, data)[0].sum().backward()
        assert [float(optimizer.state["step"]) for optimizer in on] == [2.0] * 3
    for one, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_table_that_is_no_longer_frozen_gets_a_state_that_the_kernel_can_read() -> None:
    ours = weights(torch.bfloat16)
    optimizers = fused("adagrad")
    optimizers[1].state["sum"] = torch.zeros(ROWS[1], DIMS[1], dtype=torch.bfloat16)  # as torch.optim keeps it
    ours[1].requires_grad_(False)
    kernel, data = cpu.build(sums(ours, optimizers)), batch(6, 4, False)
    kernel(ours, data)[0].sum().backward()
    before = ours[1].detach().clone()
    ours[1].requires_grad_(True)
    kernel(ours, data)[0].sum().backward()
    assert not torch.equal(ours[1], before)
    assert optimizers[1].state["sum"].dtype == torch.float32
    assert [float(optimizer.state["step"]) for optimizer in optimizers] == [2.0, 1.0, 2.0]


def test_an_error_of_the_kernel_leaves_weights_states_and_steps() -> None:
    ours, optimizers = weights(torch.float32), fused("adagrad")
    kernel, data = cpu.build(sums(ours, optimizers)), batch(6, 4, False)
    kernel(ours, data)[0].sum().backward()
    before = [weight.detach().clone() for weight in ours]
    output = kernel(ours, data)[0].sum()
    data.values.data[0] = 10**6  # changed between forward and backward, past autograd
    with refused("changed_before_backward", error=InputError):
        output.backward()
    assert all(torch.equal(weight, start) for weight, start in zip(ours, before, strict=True))
    assert [float(optimizer.state["step"]) for optimizer in optimizers] == [1.0] * 3


def test_tables_without_rows() -> None:
    specs = tuple(
        TableSpec(name, (name,), (name,), rows, 4, "SUM", HashConfig().resolve(max(rows, 1), adopt=True), 0.0, 0.0)
        for name, rows in (("empty", 0), ("t", 3))
    )
    weights = [nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(3, 4))]
    optimizers = [FusedOptimizer(RULE["sgd"], {"lr": 1.0}) for _ in specs]
    choice = select_backend(LookupSpec(specs, "SUM", False, weights, optimizers), "auto", "")
    assert choice.backend == "cpu"
    batch = LookupBatch(torch.tensor([2, 2]), torch.tensor([0, 0, 2]), None, 1)
    choice.kernel(weights, batch)[0].sum().backward()
    assert weights[1][2].tolist() == [-1.0] * 4
