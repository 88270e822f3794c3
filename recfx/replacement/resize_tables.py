"""Gives tables more rows: the parameter object stays, and its data is replaced."""

from __future__ import annotations

import gc
from types import TracebackType

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recfx.errors import ConversionError
from recfx.optim.attached import attached_optimizers


class TableResizing:
    """Gives tables of a model more rows, and takes them away again if the conversion fails."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._optimizers: list[torch.optim.Optimizer] | None = None
        self._old: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = []

    def resize(self, weight: nn.Parameter, rows: int, path: str, config: BaseEmbeddingConfig, init_fn: bool) -> None:
        """Replace the parameter's data with ``rows`` rows, the old ones first; the parameter object stays. With
        ``init_fn``, ``config.init_fn`` fills the new rows now; otherwise rows are filled when they are given out.
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
        optimizers = list(attached_optimizers(weight)) or self._holding_state_for(weight)
        if optimizers:
            raise ConversionError(
                f"table {table!r} is to have {rows} rows instead of {weight.shape[0]}, but its "
                f"{type(optimizers[0]).__name__} is bound to the rows it has.",
                reason="optimizer_holds_state",
                module_path=path,
                what_to_do="convert first, then make the optimizer.",
            )
        self._old.append((weight, weight.data, weight.grad))
        grad, weight.grad = weight.grad, None
        weight.data = _append_rows(weight.data, rows)
        if init_fn and config.init_fn is not None and not weight.is_meta:
            config.init_fn(weight.data[self._old[-1][1].shape[0] :])
        if grad is not None:
            weight.grad = _append_rows(grad, rows)

    def rows_before(self, weight: object) -> int | None:
        """How many rows the parameter had, if it has more now: another table of the same weight has been resized."""
        return next((data.shape[0] for resized, data, _ in self._old if resized is weight), None)

    def _holding_state_for(self, weight: nn.Parameter) -> list[torch.optim.Optimizer]:
        """Ordinary optimizers of this process that hold rows of state for ``weight``; torch has no registry of them."""
        if self._optimizers is None:
            objects = gc.get_objects()
            optimizers = [item for item in objects if issubclass(type(item), torch.optim.Optimizer)]
            # TorchRec's placeholders have no state.
            self._optimizers = [optimizer for optimizer in optimizers if hasattr(optimizer, "state")]
        return [
            optimizer
            for optimizer in self._optimizers
            if any(
                isinstance(value, torch.Tensor) and value.dim() for value in optimizer.state.get(weight, {}).values()
            )
        ]

    def mark(self) -> int:
        """A point that ``undo`` can return to."""
        return len(self._old)

    def undo(self, mark: int = 0) -> None:
        """Give the tables that were resized since ``mark`` their old rows back."""
        while len(self._old) > mark:
            weight, data, grad = self._old.pop()
            weight.grad = None
            weight.data = data
            weight.grad = grad

    def keep(self) -> None:
        """Keep the new rows: the conversion has succeeded."""
        self._old.clear()

    def __enter__(self) -> TableResizing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _append_rows(data: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([data, data.new_zeros(rows - data.shape[0], data.shape[1])])
