"""Files of the models of the zoo answer as the models do in eval mode, or the error says why there can be none."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import recfx
from recfx.exporter.compare_outputs import first_difference, run_model
from recfx.exporter.patterns import return_pattern, take_apart
from tests.models.case import Case
from tests.support.refusals import refused

NOT_SCRIPTABLE = {
    # What these do is not part of a traced graph, and TorchScript does not compile their own code.
    "autocast", "autocast_below_the_root", "branches_on_data", "branches_on_data_below_the_root",
    "random_numbers", "random_numbers_below_the_root",
    # They choose a module by the size of the batch.
    "sparse_nn_negatives", "sparse_nn_negatives_with_parameters",
}  # fmt: skip

NOT_EXPORTABLE = {
    # A program would forget what it changes.
    "batch_norm_and_a_counter",
    # Whether they compute something depends on a value in the batch.
    "branches_on_data", "branches_on_data_below_the_root",
    # They take the batch size for a constant, as KeyedJaggedTensor.from_jt_dict does, or for a key.
    "preprocessing_collections", "preprocessing_module", "sparse_nn_negatives",
    "sparse_nn_negatives_with_parameters",
    # Its lengths are one flat tensor, so that no size of the batch is a symbol of its own.
    "builds_its_batch",
}  # fmt: skip

REFUSALS = {"torchscript": ("not_scriptable", NOT_SCRIPTABLE), "pt2": ("not_exportable", NOT_EXPORTABLE)}
"""By format: the reason code, and the models."""


def named_tensors(answer: Any) -> list[tuple[str, torch.Tensor]]:
    return list(take_apart(return_pattern(answer), answer).items())


NOT_IN_FILES = {
    "sequence_to_dense": "unsupported_output",  # an item for each sample
    "sequence_variable_batch": "unsupported_argument",
    "builds_from_jagged": "unsupported_argument",
}
"""What no format takes, by reason code."""


def assert_files_answer(model: nn.Module, case: Case, folder: Path) -> None:
    """The files of a converted model answer as it does in eval mode, or are refused and not written."""
    was_training = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    written = []
    for format, (reason, names) in REFUSALS.items():
        if case.name not in names | NOT_IN_FILES.keys():
            report = recfx.export(model, folder / format, case.sample(), format=format)
            counts = case.name == "batch_norm_and_a_counter"
            assert ("keeps_state" in {note.code for note in report.notes}) == counts
            written.append(format)
            continue
        with refused(NOT_IN_FILES.get(case.name, reason), error=recfx.ExportError) as raised:
            recfx.export(model, folder / format, case.sample(), format=format)
        assert raised.value.what_to_do
        if (format, case.name) == ("pt2", "branches_on_data_below_the_root"):
            assert raised.value.module_path == "inner"
    assert sorted(path.name for path in folder.iterdir()) == sorted(written)
    assert [module.training for module in model.modules()] == was_training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.eval()
    files = [recfx.load(folder / format) for format in written]
    for batch_size in (7, 1, 0) if files else ():
        try:
            call = case.sample(batch_size)
            expected = named_tensors(run_model(model, call))
        except (RuntimeError, IndexError):  # some models cannot be called with an empty batch
            assert batch_size == 0
            continue
        assert expected
        for format, file in zip(written, files, strict=True):
            answer = named_tensors(run_model(file, call))
            assert first_difference(expected, answer, case.rtol, case.atol) is None, (format, batch_size)
