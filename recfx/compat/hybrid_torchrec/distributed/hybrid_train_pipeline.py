"""``HybridTrainPipelineSparseDist``: sends the ids of the next batches while a batch is trained."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recfx.errors import ConversionError
from recfx.pipeline.train_pipeline import TrainPipeline


class HybridTrainPipelineSparseDist:
    """Trains a sharded model on the batches of an iterator.

    The model's ``forward`` takes a batch (TorchRec's ``Pipelineable``) and returns ``(loss, output)``. The loss may
    have several elements; their sum is minimised.

    Args:
        model: the result of ``DistributedModelParallel``.
        optimizer: the model's optimizer, including fused ones (``CombinedOptimizer``).
        device: the device of the model.
        execute_all_batches: must be True: the batches in flight are trained when the iterator ends.
        apply_jit: must be False.
        return_loss: whether ``progress`` also returns the loss.
        pipe_n_batch: from 1 to 12; the number of batches that Rec SDK Torch keeps in flight. It is checked but not
            used, because the results are the same and the pipeline here chooses its own number.

    Raises:
        ConversionError: ``pipeline_argument``, and those of :class:`recfx.TrainPipeline`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        return_loss: bool = False,
        pipe_n_batch: int = 6,
    ) -> None:
        for name, value, is_right, what_to_do in (
            ("execute_all_batches", execute_all_batches, execute_all_batches is True, "every batch is trained."),
            ("apply_jit", apply_jit, apply_jit is False, "graphs of sharded tables are not scripted."),
            ("pipe_n_batch", pipe_n_batch, type(pipe_n_batch) is int and 1 <= pipe_n_batch <= 12, "from 1 to 12."),
        ):
            if not is_right:
                raise ConversionError(f"{name} is {value!r}.", reason="pipeline_argument", what_to_do=what_to_do)
        self._model, self._return_loss = model, return_loss
        self._pipeline = TrainPipeline(model, optimizer, device)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train one batch, and return the model's output; with ``return_loss``, ``(output, loss)``, the loss detached.

        Raises:
            StopIteration: every batch has been trained.
        """
        returned: list[Any] = []  # the pipeline calls the model once per batch, and checks what it returns
        hook = self._model.register_forward_hook(lambda _, __, answer: returned.append(answer))
        try:
            output = self._pipeline.progress(dataloader_iter)
        finally:
            hook.remove()
        return (output, returned[-1][0].detach()) if self._return_loss else output
