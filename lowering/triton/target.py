"""Target ``triton``: recfx's kernels in Triton, for CUDA and Triton's interpreter; and what ``npu`` shares with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.kernels.build import launch, tiling
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_triton
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec, Outputs
from recfx.lowering.step.trainable_lookup import Backward, LookedUp, TrainableLookup
from recfx.lowering.step.trained_batch import Gradients, TrainedBatch, joined_by_key, reached
from recfx.optim.fused_step_op import fused_step_triton_, triton_module
from recfx.optim.rules import rule_named
from recfx.optim.rules.rule import STEP, StepNumbers
from recfx.optim.rules.sgd import SGD

_DIM = 1024  # the widest row that the kernels are checked with
_COUNT = 2**31 - 1  # bags and output columns are numbered in int32


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None if there are kernels in Triton for the lookup, and they fit the NPU of this name, if there is one."""

    def refuse(reason: str, message: str) -> Diagnostic:
        return Diagnostic(reason, "", message)

    too_wide = too_many_columns(lookup)
    if too_wide is not None:
        return too_wide
    rules = []
    for name in dict.fromkeys(optimizer.rule for optimizer in lookup.optimizers):
        rule = rule_named(name)
        if rule is None or not triton_module(rule):
            return refuse("optimizer", f"there is no step of {name} in Triton.")
        rules.append(rule)
    if chip is None:
        return None
    try:
        limits = tiling.chip_named(chip)
    except ValueError as error:
        return refuse("no_tiling_table", f"{error}.")
    widest = max(table.embedding_dim for table in lookup.tables)
    block, size = tiling.block_of(widest), lookup.facts[0].dtype.itemsize
    kernels: list[tuple[str, tiling.RuleNeeds | None]] = [("recfx_gather_rows", None)]
    if lookup.combine != NOT_COMBINED:
        kernels = [("recfx_pooled_lookup", None), ("recfx_per_sample_weight_gradients", None)]
    for rule in rules or [SGD]:  # whose step gives the gradient of the weights
        if rule.needs is None:
            return refuse("unified_buffer", f"the unified buffer that a step of {rule.name} takes was never measured.")
        kernels += [("recfx_fused_step", rule.needs), ("recfx_fused_step_of_borders", rule.needs)]
    for kernel, needs in kernels:
        too_large = tiling.refusal(limits, kernel, block, size, needs)
        if too_large:
            return refuse("unified_buffer", too_large)
    return None


def too_many_columns(lookup: LookupFacts) -> Diagnostic | None:
    """None if the kernels can number the columns of the lookup."""
    widest = max(lookup.tables, key=lambda table: table.embedding_dim)
    message = ""
    if widest.embedding_dim > _DIM:
        message = f"the kernels take rows of up to {_DIM} columns, table {widest.name!r} has {widest.embedding_dim}."
    elif sum(table.embedding_dim * len(table.feature_names) for table in lookup.tables) > _COUNT:
        message = f"the kernels number output columns up to {_COUNT}."
    return Diagnostic("too_many_columns", "", message) if message else None


def is_here(device: torch.device) -> Diagnostic | None:
    """None if Triton has a compiler for the device, or interprets kernels, and there is a tiling table for its chip."""
    refusal = launch.refusal(device)
    return Diagnostic(refusal[0], "", refusal[1]) if refusal else None


def form(device_type: str) -> str:
    """``"gpu"`` where kernels that have a form for GPUs run in it; ``""`` elsewhere."""
    return "gpu" if device_type == "cuda" and launch.takes_gpu_forms(torch.device(device_type)) else ""


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel of one lookup."""
    return build_with(spec, look_up)


def build_with(spec: LookupSpec, look_up: Callable[..., Outputs]) -> LookupKernel:
    """The kernel of one lookup with another forward, whose arguments and outputs are those of ``look_up``."""
    backward = TritonBackward(spec)
    trainable, tables = TrainableLookup(backward), backward.table_of_feature

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> Outputs:
        rows, offsets = batch.values.to(torch.int64).contiguous(), batch.offsets.to(torch.int64).contiguous()
        read = [weight.detach() for weight in weights]

        def forward(scale: torch.Tensor | None) -> LookedUp:
            scale = None if scale is None else scale.contiguous()
            how = (backward.mean, scale, backward.unpooled)
            return LookedUp(look_up(rows, offsets, batch.lengths, read, tables, *how), rows)

        return trainable(weights, offsets, batch.per_sample_weights, forward)

    lookup.trainable = trainable  # type: ignore[attr-defined]  # of a function
    return lookup


def look_up(rows: torch.Tensor, offsets: torch.Tensor, lengths: Sequence[int], *how: Any) -> Outputs:
    """The outputs of ``pooled_lookup_triton``; if rows are not combined, those of each feature, by its length."""
    output = pooled_lookup_triton(rows, offsets, *how)
    # Detached, because autograd lets nobody change views of what a function returns.
    return tuple(part.detach() for part in output.split(lengths)) if how[-1] else (output,)


class TritonBackward(Backward):
    """The backward of one lookup, whose weights are not kept."""

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        tables = [weight.detach() for weight in batch.weights]
        return per_sample_weight_gradients_triton(
            batch.values, batch.offsets, grad_output, tables, self.table_of_feature
        )

    def weight_gradients(
        self, batch: TrainedBatch, gradients: Gradients, is_needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """See ``Backward``. A step of SGD from zero with learning rate -1 is the gradient."""
        batch, grad_output = self._joined(batch, gradients)
        nothing = torch.zeros(1, dtype=torch.float32, device=grad_output.device)
        totals = [
            # The kernel leaves tables alone that are not stepped; of those, it takes the shape.
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            if needed
            else nothing.expand(weight.shape)
            for weight, needed in zip(batch.weights, is_needed, strict=True)
        ]
        self._launch(batch, grad_output, totals, ([], []), list(is_needed), triton_module(SGD), StepNumbers(-1.0))
        return [total if needed else None for total, needed in zip(totals, is_needed, strict=True)]

    def _joined(self, batch: TrainedBatch, gradients: Gradients) -> tuple[TrainedBatch, torch.Tensor]:
        """The gradients in one tensor, and the batch without ids that get none."""
        if None in gradients:
            batch, gradients = joined_by_key([batch], [gradients])
        given = [gradient for gradient in gradients if gradient is not None]
        return batch, given[0].contiguous() if len(given) == 1 else torch.cat(given)

    def step(self, batch: TrainedBatch, gradients: Gradients) -> None:
        """See ``Backward``. Tables whose numbers are equal are stepped in one launch; frozen ones need no state."""
        is_reached = reached(self.table_of_feature, gradients, len(batch.weights))
        batch, grad_output = self._joined(batch, gradients)
        weights = [weight.data for weight in batch.weights]  # a step is not an edit that autograd should see
        trained = [table for table, weight in enumerate(batch.weights) if weight.requires_grad and is_reached[table]]
        if not trained:
            return
        for table in trained:
            self.optimizers[table].prepare(batch.weights[table])
        rule = self.optimizers[0].rule  # tables of one lookup have the same rule
        # The state of a table that is not stepped is not read.
        is_trained = set(trained)
        with_state = [self.optimizers[table if table in is_trained else trained[0]] for table in range(len(weights))]
        states = [[optimizer.state[state.name] for optimizer in with_state] for state in rule.states]
        first, second = (*states, [], [])[:2]
        alike: dict[StepNumbers, list[int]] = {}
        for table in trained:
            alike.setdefault(self._numbers(table), []).append(table)
        for numbers, tables in alike.items():
            of_launch = set(tables)
            is_stepped = [table in of_launch for table in range(len(weights))]
            module = triton_module(rule)
            self._launch(batch, grad_output, weights, (first, second), is_stepped, module, numbers, rule.has_row_state)
            if rule.counts_steps:  # a launch that raises has not begun
                for table in tables:
                    self.optimizers[table].state[STEP] += 1

    def _numbers(self, table: int) -> StepNumbers:
        optimizer, step = self.optimizers[table], 0.0
        if optimizer.rule.counts_steps:
            step = float(optimizer.state[STEP]) + 1
        return optimizer.rule.step_numbers(step, optimizer.group)

    def _launch(
        self,
        batch: TrainedBatch,
        grad_output: torch.Tensor,
        weights: list[torch.Tensor],
        states: tuple[list[torch.Tensor], list[torch.Tensor]],
        is_stepped: list[bool],
        rule_module: str,
        numbers: StepNumbers,
        first_is_per_row: bool = False,
    ) -> None:
        fused_step_triton_(
            batch.values, batch.offsets, grad_output, weights, *states, self.table_of_feature, is_stepped,
            rule_module, first_is_per_row, list(numbers), self.mean, batch.scale, self.unpooled,
        )  # fmt: skip
