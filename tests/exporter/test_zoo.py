"""Every model of the zoo: exported, it answers as it did in eval mode, or the error says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recfx.conversion.convert import convert
from recfx.errors import ExportError
from recfx.exporter.compare_outputs import first_difference, run_model
from recfx.exporter.export import export
from recfx.exporter.load import load
from recfx.exporter.returns import return_pattern, take_apart
from tests.models import ZOO, Case

REFUSED = {
    # A trace takes the counter for a constant.
    "batch_norm_and_a_counter": "a call of the model changes buffer 'inner.steps'",
    # What these do is not part of a traced graph, and TorchScript does not compile their own code.
    "autocast": "autocast",
    "autocast_below_the_root": "forward",
    "branches_on_data": "no attribute or method 'forward'",
    "branches_on_data_below_the_root": "no attribute or method 'forward'",
    "builds_from_jagged": "inner: it cannot be traced",
    "random_numbers": "differs",
    "random_numbers_below_the_root": "differs",
    # They choose a module by the size of the batch.
    "sparse_nn_negatives": "postproc_module: it cannot be traced (KeyError: 'Proxy(size)' (at ",
    "sparse_nn_negatives_with_parameters": "postproc_module: it cannot be traced (KeyError: 'Proxy(size)' (at ",
}


@pytest.mark.parametrize("case", [c for c in ZOO if c.name not in REFUSED], ids=lambda case: case.name)
def test_the_file_answers_as_the_model_does(case: Case, tmp_path: Path) -> None:
    with case.around():
        model = convert(case.model(), case.sample(), verify=False)
        was_training = [module.training for module in model.modules()]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        report = export(model, tmp_path / "model.pt", case.sample())
        assert "keeps_state" not in {note.code for note in report.notes}
        assert [module.training for module in model.modules()] == was_training
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        model.eval()
        loaded, compared = load(tmp_path / "model.pt"), 0
        for batch_size in (7, 1, 0):
            try:
                call = case.sample(batch_size)
                wanted = run_model(model, call)
            except (RuntimeError, IndexError):  # some models cannot be called with an empty batch
                assert batch_size == 0
                continue
            pattern = return_pattern(wanted)
            answer = run_model(loaded, call)
            found = list(take_apart(return_pattern(answer), answer).items())
            expected = list(take_apart(pattern, wanted).items())
            assert first_difference(expected, found, case.rtol, case.atol) is None, batch_size
            compared += len(expected)
        assert compared


@pytest.mark.parametrize("case", [c for c in ZOO if c.name in REFUSED], ids=lambda case: case.name)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(case: Case, tmp_path: Path) -> None:
    with case.around():
        model = convert(case.model(), case.sample(), verify=False)
        with pytest.raises(ExportError, match="not_scriptable") as raised:
            export(model, tmp_path / "model.pt", case.sample())
        assert REFUSED[case.name] in str(raised.value)
        assert raised.value.what_to_do
        assert list(tmp_path.iterdir()) == []
