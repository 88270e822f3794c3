"""Every rule: its step beside a dense optimizer and beside FBGEMM's formulas, what it keeps, and its names."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor, nn
from torchrec.optim import optimizers as torchrec_optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recfx.optim.fused_params import fused_optimizer_from_params
from recfx.optim.rules import RULES, rule_of_class, rule_of_type
from recfx.optim.rules.adagrad import ADAGRAD
from recfx.optim.rules.adam import ADAM, PARTIAL_ROWWISE_ADAM, PartialRowWiseAdam
from recfx.optim.rules.lamb import LAMB, PARTIAL_ROWWISE_LAMB, Lamb, PartialRowWiseLamb
from recfx.optim.rules.lars_sgd import LARS_SGD, LarsSgd
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD, ROWWISE_ADAGRAD_DECOUPLED, DecoupledRowWiseAdagrad
from recfx.optim.rules.rule import Rule
from recfx.optim.rules.sgd import SGD
from tests.optim.rules.steps import (
    DIM,
    ROWS,
    Formula,
    batch,
    check_against_dense,
    check_against_formula,
    check_other_rows_stay,
    fused,
    table,
)


def averages_of(
    settings: dict[str, Any], state: dict[str, Tensor], gradient: Tensor, squares: Tensor, step: int
) -> Any:
    """The step of Adam, as FBGEMM documents it, without the learning rate."""
    (beta1, beta2), eps = settings.get("betas", (0.9, 0.999)), settings.get("eps", 1e-8)
    first = state["exp_avg"].mul_(beta1).add_((1 - beta1) * gradient)
    second = state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * squares)
    return first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)


def partial_rowwise_adam(settings: dict[str, Any]) -> Formula:
    rate, decay = settings["lr"], settings.get("weight_decay", 0.0)

    def formula(values: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        adam = averages_of(settings, state, gradient, gradient.square().mean(), step)
        return values - rate * (adam + decay * values)

    return formula


def lamb(settings: dict[str, Any], *, per_row: bool = False) -> Formula:
    rate, decay = settings["lr"], settings.get("weight_decay", 0.0)

    def formula(values: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        squares = gradient.square().mean() if per_row else gradient.square()
        change = averages_of(settings, state, gradient, squares, step) + decay * values
        return values - rate * values.norm() / change.norm() * change

    return formula


def lars_sgd(settings: dict[str, Any]) -> Formula:
    rate, eta = settings["lr"], settings.get("eta", 0.001)
    momentum, decay = settings.get("momentum", 0.9), settings.get("weight_decay", 0.0)

    def formula(values: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        adjusted = rate * eta * values.norm() / (gradient.norm() + decay * values.norm())
        return values - state["momentum_buffer"].mul_(momentum).add_(adjusted * (gradient + decay * values))

    return formula


class Case(NamedTuple):
    """What is expected of a rule.

    Args:
        classes: the classes that it stands for.
        types: TorchRec's names for it.
        shapes: the shapes of its state under TorchRec's names.
        settings: settings with which its step is compared.
        formula: FBGEMM's formula, if no other optimizer than recfx's own runs it.
    """

    classes: tuple[type, ...]
    types: tuple[EmbOptimType, ...]
    shapes: dict[str, tuple[int, ...]]
    settings: tuple[dict[str, Any], ...]
    formula: Callable[[dict[str, Any]], Formula] | None = None


LR, EPS, DECAY = {"lr": 0.3}, {"lr": 0.3, "eps": 0.1}, {"lr": 0.3, "weight_decay": 0.2}
START = {"lr": 0.3, "initial_accumulator_value": 0.5}
BETAS_AND_DECAY = {"lr": 0.3, "betas": (0.5, 0.75), "weight_decay": 0.1}
LARS = {"lr": 3.0, "eta": 0.1}
WHOLE = {"momentum1": (ROWS, DIM), "exp_avg_sq": (ROWS, DIM), "step": (1,)}
ROWWISE = {**WHOLE, "exp_avg_sq": (ROWS,)}
CASES = {
    SGD: Case(
        (torch.optim.SGD, torchrec_optim.SGD),
        (EmbOptimType.SGD, EmbOptimType.EXACT_SGD),
        {},
        (LR, {"lr": torch.tensor(0.3)}, DECAY),
    ),
    ADAGRAD: Case(
        (torch.optim.Adagrad, torchrec_optim.Adagrad),
        (EmbOptimType.EXACT_ADAGRAD,),
        {"momentum1": (ROWS, DIM)},  # steps are counted, but no rule reads their number: it is not saved
        (LR, EPS, DECAY, START),
    ),
    ROWWISE_ADAGRAD: Case(
        (RowWiseAdagrad,),
        (EmbOptimType.ROWWISE_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
        {"momentum1": (ROWS,)},
        (LR, EPS, DECAY, START),
    ),
    ROWWISE_ADAGRAD_DECOUPLED: Case((DecoupledRowWiseAdagrad,), (), {"momentum1": (ROWS,)}, (LR, DECAY, START)),
    ADAM: Case(
        (torch.optim.Adam, torchrec_optim.Adam),
        (EmbOptimType.ADAM,),
        WHOLE,
        (LR, EPS, DECAY, {"lr": 0.3, "betas": (0.5, 0.75)}),
    ),
    PARTIAL_ROWWISE_ADAM: Case(
        (PartialRowWiseAdam, torchrec_optim.PartialRowWiseAdam),
        (EmbOptimType.PARTIAL_ROWWISE_ADAM,),
        ROWWISE,
        (LR, EPS, DECAY, BETAS_AND_DECAY),
        partial_rowwise_adam,
    ),
    LAMB: Case((Lamb, torchrec_optim.LAMB), (EmbOptimType.LAMB,), WHOLE, (LR, EPS, DECAY, BETAS_AND_DECAY), lamb),
    PARTIAL_ROWWISE_LAMB: Case(
        (PartialRowWiseLamb, torchrec_optim.PartialRowWiseLAMB),
        (EmbOptimType.PARTIAL_ROWWISE_LAMB,),
        ROWWISE,
        (LR, EPS, DECAY, BETAS_AND_DECAY),
        lambda settings: lamb(settings, per_row=True),
    ),
    LARS_SGD: Case(
        (LarsSgd, torchrec_optim.LarsSGD),
        (EmbOptimType.LARS_SGD,),
        {"momentum1": (ROWS, DIM)},
        (LARS, {**LARS, "momentum": 0.0}, {**LARS, "weight_decay": 0.2}, {"lr": 3.0}),
        lars_sgd,
    ),
}
every_rule = pytest.mark.parametrize("rule", CASES, ids=lambda rule: rule.name)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        pytest.param(rule, settings, id=f"{rule.name}-{','.join(settings)}")
        for rule, case in CASES.items()
        for settings in case.settings
    ],
)
def test_steps(rule: Rule, settings: dict[str, Any]) -> None:
    check_against_dense(rule, settings)
    check_other_rows_stay(rule, settings)
    if formula := CASES[rule].formula:
        check_against_formula(rule, settings, formula(settings))


@every_rule
def test_what_stands_for_it(rule: Rule) -> None:
    assert [rule_of_class(kind) for kind in CASES[rule].classes] == [rule] * len(CASES[rule].classes)
    assert [rule_of_type(kind) for kind in CASES[rule].types] == [rule] * len(CASES[rule].types)


@every_rule
def test_its_state(rule: Rule) -> None:
    ours = fused(rule, LR, table())
    assert {name: tuple(value.shape) for name, value in ours.named_state().items()} == CASES[rule].shapes
    assert ours.starts() == dict.fromkeys(CASES[rule].shapes, 0.0)
    for spec in rule.states:
        assert ours.named_state()[spec.saved_as].data_ptr() == ours.state[spec.name].data_ptr()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.start_setting], ids=lambda rule: rule.name)
def test_a_state_that_starts_elsewhere(rule: Rule) -> None:
    ours = fused(rule, START, table())
    assert torch.equal(ours.state["sum"], torch.full((ROWS, 1 if rule.has_row_state else DIM), 0.5))
    assert (ours.state["step"], ours.start("step"), ours.starts()) == (0.0, 0.0, {"momentum1": 0.5})
    ours.state["sum"].fill_(3.0)
    ours.reset_rows(torch.tensor([2]))
    assert ours.state["sum"][:, 0].tolist() == [3.0, 3.0, 0.5, 3.0, 3.0, 3.0, 3.0]


def test_what_makes_a_rule_unlike_the_dense_one() -> None:
    assert ADAM.unlike_dense({"lr": 1.0}) == "Adam"  # always: its averages go on
    assert SGD.unlike_dense({"lr": 1.0}) == ""
    assert SGD.unlike_dense({"lr": 1.0, "weight_decay": 0.25}) == "sgd with weight_decay=0.25"
    assert [LAMB.unlike_dense(DECAY), ROWWISE_ADAGRAD_DECOUPLED.unlike_dense(DECAY)] == ["", ""]


@pytest.mark.parametrize("rule", [LAMB, LARS_SGD, PARTIAL_ROWWISE_LAMB], ids=lambda rule: rule.name)
def test_a_step_of_zeros_changes_nothing(rule: Rule) -> None:
    """FBGEMM divides zero by zero then."""
    weight = table()
    fused(rule, LR, weight).step(weight, torch.arange(ROWS), torch.zeros(ROWS, DIM))
    assert torch.equal(weight, table())


def test_a_row_that_comes_late_is_corrected_by_the_tables_count() -> None:
    """As dense Adam corrects a row that had gradients of zero until then."""
    weight, parameter, late = table(), nn.Parameter(table()), torch.tensor([5])
    ours, dense = fused(ADAM, LR, weight), torch.optim.Adam([parameter], lr=0.3)
    for step, touched in enumerate((torch.arange(5), torch.arange(5), late)):
        rows, gradient = batch(step, touched)
        ours.step(weight, rows, gradient)
        parameter.grad = torch.zeros(ROWS, DIM).index_add_(0, rows, gradient)
        dense.step()
    torch.testing.assert_close(weight[5], parameter[5].detach(), rtol=1e-5, atol=1e-6)
    assert ours.state["step"] == 3.0


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("mode", [WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE])
def test_modes_of_weight_decay_are_those_of_fbgemm(mode: WeightDecayMode, decay: float) -> None:
    """In float16: FBGEMM's float32 kernel for the CPU ignores weight decay in every mode (fbgemm-gpu-cpu 1.8.0)."""
    params: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.3, "eps": 0.1, "weight_decay": decay,
        "weight_decay_mode": mode,
    }  # fmt: skip
    theirs: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)], weights_precision=SparseType.FP16, **params
    )
    (their_weight,) = theirs.split_embedding_weights()
    their_weight.copy_(table())
    weight, ours = table().half(), fused_optimizer_from_params(params)
    ours.prepare(weight)
    for step, touched in enumerate(([0, 1, 2, 3, 4, 5, 6], [1, 4], [0, 4, 6])):
        rows, gradient = batch(step, torch.tensor(touched))
        theirs(rows, torch.arange(rows.numel() + 1)).backward(gradient)
        ours.step(weight, rows, gradient)
        torch.testing.assert_close(weight, their_weight, rtol=2e-3, atol=2e-3)  # each step rounds
    ((their_sum,),) = theirs.split_optimizer_states()
    torch.testing.assert_close(ours.named_state()["momentum1"], their_sum, rtol=2e-3, atol=2e-3)


def test_a_dense_optimizer_of_recfx_refuses_a_setting_that_its_rule_lacks() -> None:
    with pytest.raises(TypeError, match="Lamb has no setting 'momentum', but lr, eps, betas, weight_decay"):
        Lamb([nn.Parameter(table())], momentum=0.5)
