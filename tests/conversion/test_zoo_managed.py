"""Every model of the zoo that is behind managed collisions: converted, it does what it did with the ids it knows."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.exporter.compare_outputs import run_model
from tests.builders.managed_collisions import FEATURES
from tests.models import MANAGED, Case
from tests.models.case import assert_agree, run, tensors_in

each_model = pytest.mark.parametrize("case", MANAGED, ids=lambda case: case.name)
# Tables that evict ids, as those of MCH do, are trained by fused optimizers only, which leave no gradients to compare.
UNTIL_FULL = {table: recfx.HashConfig(unseen="row") for table in FEATURES}


def converted(case: Case, *arguments: Any, model: nn.Module | None = None, **settings: Any) -> Any:
    hashing = UNTIL_FULL if case.name.startswith("mch") else recfx.HashConfig()
    settings = {"hashing": hashing, **settings}
    return recfx.convert(model or case.model(), *arguments, managed_collisions="convert", **settings)


def assert_same_answers(reference: nn.Module, model: nn.Module, case: Case) -> None:
    if reference.training:
        assert_agree(reference, model, case)
        return
    for batch_size in (4, 7):
        call = case.sample(batch_size)
        for expected, answer in zip(
            run(reference, call, backward=False), run(model.eval(), call, backward=False), strict=True
        ):
            assert torch.equal(answer, expected)


@each_model
@pytest.mark.parametrize("settings", [{}, {"inplace": True}, {"whole_graph": True}], ids=str)
def test_it_agrees(case: Case, settings: dict[str, Any]) -> None:
    reference, original = case.model(), case.model()
    model = converted(case, case.sample(), model=original, **settings)
    assert_same_answers(reference, model, case)
    if not settings:
        assert_same_answers(reference, case.model(), case)
        assert_same_answers(case.model(), original, case)


@each_model
def test_copies_are_independent_and_the_map_comes_back(case: Case) -> None:
    original: Any = case.model()
    model = converted(case, model=original)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_answers(case.model(), copied, case)
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for weight in copied.parameters():
                weight.zero_()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(recfx.ConversionError):
        recfx.unconvert(model)
    _, mapping = recfx.unconvert(model, with_mapping=True)
    remapping = original.mc._managed_collision_collection
    remapped = remapping.eval()(case.sample(7).args[0])
    asked = case.sample(7).args[0]
    row_of = {
        (key, int(id_)): int(row)
        for key in remapped.keys()  # noqa: SIM118 (a KeyedJaggedTensor is no dict)
        for id_, row in zip(asked[key].values(), remapped[key].values(), strict=True)
    }
    table_of = {"f": "a", "g": "a", "h": "b"}
    for table, (ids, rows) in mapping.items():
        ours = dict(zip(ids.tolist(), rows.tolist(), strict=True))
        for (key, id_), row in row_of.items():
            if table.endswith(table_of[key]):
                assert ours[id_] == row


@each_model
@pytest.mark.parametrize("format", ["torchscript", "pt2"])
def test_files_answer_as_the_model_does(case: Case, format: str, tmp_path: Path) -> None:
    reference = case.model().eval()
    recfx.export(converted(case).eval(), tmp_path / "model", case.sample(), format=format)
    file = recfx.load(tmp_path / "model")
    for batch_size in (7, 1):
        call = case.sample(batch_size)
        (expected,), (answer,) = (tensors_in(run_model(one, call)) for one in (reference, file))
        torch.testing.assert_close(answer, expected, rtol=case.rtol, atol=case.atol)
