"""Whether a file that was just written answers as the model does.

A file with the model's own rows is compared with the model. Quantized rows change what the model answers by more than
any error of the program would, so the program is compared with the model's own code around collections that hold the
file's rows. So are other batches of a model whose tables are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recfx.collections.copy_modules import copy_modules
from recfx.discovery.sample import Sample
from recfx.errors import Diagnostic
from recfx.exporter.arguments import Pattern, Signature
from recfx.exporter.artifacts import Artifact
from recfx.exporter.buffers import Filling
from recfx.exporter.compare_outputs import changed_buffer, first_difference, largest_output_difference, run_model
from recfx.exporter.model_copies import fresh_copy
from recfx.exporter.returns import take_apart
from recfx.exporter.served_collection import ServedCollection

_Outputs = list[tuple[str, torch.Tensor]]


class Comparison:
    """What a file has to answer.

    Args:
        model: converted; it does not change.
        sample: one call of it.
        others: calls with other batches, by name.
        outputs: what the model with its tables answers.
        has_tables: whether ``model`` itself has its tables.
        served: the exported graph of each collection, by ``id`` of the collection.
        signature: the arguments of the program.
        returns: what it returns.

    Attributes:
        changed_buffer: a buffer of the model that a call changes; None if there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        others: Mapping[str, Sample],
        outputs: Any,
        has_tables: bool,
        served: Mapping[int, ServedCollection],
        signature: Signature,
        returns: Pattern,
    ) -> None:
        self._model = model
        self._served = served
        self._signature = signature
        self._returns = returns
        self._has_tables = has_tables
        self._sample = sample
        self._outputs = self._by_name(outputs)
        self._others = others
        self.changed_buffer = changed_buffer(model, sample)

    def largest_difference(
        self, artifact: Artifact, fillings: list[Filling], content: Mapping[str, torch.Tensor]
    ) -> float | Diagnostic:
        """The largest difference between an output of the file and of the model; or why it is not the same program.

        Args:
            artifact: the program with its content.
            fillings: its big buffers.
            content: what the file holds in those that were not filled in memory, by name.
        """
        is_exact = not any(error for each in self._served.values() for error in each.errors.values())
        reference = self._model
        if not (is_exact and self._has_tables):
            filled = {each.buffer.data_ptr(): content[each.name] for each in fillings if each.name in content}
            reference = self._around_stored_rows(filled)
        largest = 0.0
        # One copy for all calls, because a model may change its buffers from call to call, and then so must the file.
        copy, _ = fresh_copy(reference)
        calls = {"": self._sample, **self._others}
        if self.changed_buffer is not None:
            calls["a second call with the sample"] = self._sample
        for name, call in calls.items():
            batch = f"for {name}, " if name else ""
            leaves = self._signature.flatten(call.args, call.kwargs)
            wanted = self._outputs
            try:
                if name or self.changed_buffer is not None or not is_exact:
                    wanted = self._by_name(run_model(copy, self._signature.call_of(leaves)))
            except Exception as error:  # of the user's code
                message = f"{batch}the model raises {type(error).__name__}: {error}"
                return Diagnostic("export_differs", "", message)
            try:
                found = list(run_model(artifact.named, Sample(*leaves)).items())
            except Exception as error:  # programs raise errors of many types
                return Diagnostic("export_differs", "", f"{batch}the file raises {type(error).__name__}: {error}")
            difference = first_difference(wanted, found)
            if difference is not None:
                changed = f"; a call of the model changes buffer {self.changed_buffer!r}" if self.changed_buffer else ""
                return Diagnostic("export_differs", "", f"{batch}the file answers differently: {difference}{changed}")
            if not name:
                largest = largest_output_difference(self._outputs, found)
        return largest

    def _by_name(self, outputs: Any) -> _Outputs:
        return [(name, output.detach().cpu()) for name, output in take_apart(self._returns, outputs).items()]

    def _around_stored_rows(self, filled: Mapping[int, torch.Tensor]) -> nn.Module:
        """The model with its hooks and all, whose collections look up what the file holds.

        Args:
            filled: by the address of a buffer that holds nothing, what takes its place.
        """
        copy, copies = copy_modules(self._model)
        for collection, served in self._served.items():
            lookup, _ = copy_modules(served.graph_module)
            for module in lookup.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.data_ptr() in filled:
                        module._buffers[name] = filled[buffer.data_ptr()]
            collection_copy: Any = copies[collection]
            collection_copy.answer_with(lookup)
        return copy
