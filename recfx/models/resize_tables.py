"""Gives tables more rows: the parameter object stays, and its data is replaced."""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recfx.errors import GROW, ConversionError, Diagnostic, few, plural
from recfx.optim.attached import attached_optimizers


class _Resized(NamedTuple):
    """A weight and what it was before."""

    weight: nn.Parameter
    data: torch.Tensor
    grad: torch.Tensor | None
    path: str
    table: str


class TableResizing(contextlib.AbstractContextManager["TableResizing"]):
    """Gives tables of a model more rows, and takes them away again if the conversion fails."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._old: list[_Resized] = []

    def resize(
        self, weight: nn.Parameter, rows: int, path: str, config: BaseEmbeddingConfig, init_fn: bool, learned: bool
    ) -> None:
        """Replace the parameter's data with ``rows`` rows, the old ones first; the parameter object stays. With
        ``init_fn``, ``config.init_fn`` fills the new rows now; otherwise rows are filled when they are given out.
        ``learned``: whether managed collisions have given its rows to ids.
        """
        table = config.name
        if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in self._model.modules()):
            raise ConversionError(
                f"table {table!r} is to have {rows} rows instead of {weight.shape[0]}, but "
                "DistributedDataParallel has already made its gradient buckets.",
                reason="wrapped_in_ddp",
                module_path=path,
                what_to_do="convert first, then wrap the model in DistributedDataParallel.",
            )
        optimizers = attached_optimizers(weight)
        if optimizers:
            raise ConversionError(
                f"table {table!r} is to have {rows} rows instead of {weight.shape[0]}, but its "
                f"{type(optimizers[0]).__name__} is bound to the rows it has.",
                reason="optimizer_holds_state",
                module_path=path,
                what_to_do=f"convert it without rows=. {GROW}"
                if learned
                else "convert first, then make the optimizer; for python -m recfx, return the model without it.",
            )
        try:
            data = _append_rows(weight.data, rows)
            grad = None if weight.grad is None else _append_rows(weight.grad, rows)
        except RuntimeError as error:  # of torch's allocators; those of devices raise a subclass
            size = rows * weight.shape[1] * weight.element_size() / 2**30
            raise ConversionError(
                f"table {table!r} is to have {rows:,} rows, but {weight.device.type} has no {size:,.1f} GiB for them.",
                reason="no_memory_for_rows",
                module_path=path,
                what_to_do="give it fewer rows; a model on meta can be explained and planned with any number.",
            ) from error
        self._old.append(_Resized(weight, weight.data, weight.grad, path, table))
        weight.grad = None
        weight.data = data
        if init_fn and config.init_fn is not None and not weight.is_meta:
            config.init_fn(weight.data[self._old[-1].data.shape[0] :])
        weight.grad = grad

    def rows_before(self, weight: object) -> int | None:
        """How many rows the parameter had, if it has more now: another table of the same weight has been resized."""
        return next((old.data.shape[0] for old in self._old if old.weight is weight), None)

    def notes(self) -> list[Diagnostic]:
        """For a copy: the parameters that have got more rows are also those of the model from which it is made."""
        grown: dict[str, list[str]] = {}
        for old in self._old:
            rows = f"{old.weight.shape[0]:,} instead of {old.data.shape[0]:,}"
            grown.setdefault(old.path, []).append(f"{old.table!r} ({rows})")
        return [
            Diagnostic(
                "original_has_more_rows",
                path,
                f"more rows for {plural(len(tables), 'table')}, {few(tables, 3)}: the model that is passed to convert "
                "gets them as well, because these are its parameters. It still runs; its state_dict has new shapes.",
                "nothing, if you use only what convert returns; otherwise convert copy.deepcopy(model).",
            )
            for path, tables in grown.items()
        ]

    def mark(self) -> int:
        """A point that ``undo`` can return to."""
        return len(self._old)

    def undo(self, mark: int = 0) -> None:
        """Give the tables that were resized since ``mark`` their old rows back."""
        while len(self._old) > mark:
            old = self._old.pop()
            old.weight.grad = None
            old.weight.data = old.data
            old.weight.grad = old.grad

    def keep(self) -> None:
        """Keep the new rows. An optimizer that has state for the old ones is refused when it next steps."""
        for old in self._old:
            _refuse_steps_of_old_state()
            _GROWN[old.weight] = old.data.shape[0], old.path, old.table
        self._old.clear()

    def __exit__(self, *error: object) -> None:
        self.undo()


_GROWN = WeakTensorKeyDictionary()
"""The rows that a weight had before it was given more, the path of its collection and its table."""


@functools.cache
def _refuse_steps_of_old_state() -> None:
    register_optimizer_step_pre_hook(_check_rows)


def _check_rows(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Refuse a step with state of the rows that a table had before it was given more: ``optimizer_holds_state``."""
    weights: list[nn.Parameter] = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in weights:
        grown: tuple[int, str, str] | None = _GROWN.get(weight)
        if grown is None:
            continue
        before, path, table = grown
        for value in optimizer.state.get(weight, {}).values():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape[0] == before:
                name = type(optimizer).__name__
                raise ConversionError(
                    f"table {table!r} has {weight.shape[0]} rows since it was converted, but its {name} has state for "
                    f"the {before} rows that it had before.",
                    reason="optimizer_holds_state",
                    module_path=path,
                    what_to_do="make the optimizer after the conversion.",
                )


def _append_rows(data: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([data, data.new_zeros(rows - data.shape[0], data.shape[1])])
