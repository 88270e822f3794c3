"""Plans for all optimizers in backward of a model, including those of sharded tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from recfx.checkpoint.contents import IN_BACKWARD, check_names, mismatch
from recfx.checkpoint.in_backward import ATTACH_AS_SAVED, BackwardPlan, optimizers_in_backward
from recfx.checkpoint.sharded_load import ShardedBackwardPlan
from recfx.checkpoint.table_names import sharded_tables
from recfx.hashing.row_move import RowMove


def plan_in_backward(
    model: nn.Module, described: Mapping[str, Tensor], saved: Mapping[str, Any], moves: Mapping[str, RowMove]
) -> list[BackwardPlan]:
    """Check the saved optimizers against those of this model. Changes nothing.

    Args:
        model: the model without wrappers.
        described: shapes and dtypes of everything that is saved.
        saved: kind, settings and names of the tensors of each optimizer.
        moves: the moves of tables that have more rows than saved, by weight name.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    optimizers = {each.name: each for each in optimizers_in_backward(model)}
    tables = {each.weight: each for each in sharded_tables(model) if each.first and each.name in each.module.fused}
    check_names("optimizers in backward", [*optimizers, *tables], list(saved), ATTACH_AS_SAVED)
    plans: list[BackwardPlan] = []
    for name, entry in saved.items():
        absent = [key for key in entry["tensors"] if f"{IN_BACKWARD}{name}.{key}" not in described]
        if absent:
            raise mismatch(
                f"the checkpoint lacks its state {absent[0]!a}.", module_path=name, what_to_do=ATTACH_AS_SAVED
            )
        tensors = {key: described[f"{IN_BACKWARD}{name}.{key}"] for key in entry["tensors"]}
        if name in tables:
            plans.append(ShardedBackwardPlan.of(tables[name], entry, tensors, moves.get(name)))
        else:
            plans.append(BackwardPlan(optimizers[name], entry, tensors, moves.get(name)))
        plans[-1].check()
    return plans
