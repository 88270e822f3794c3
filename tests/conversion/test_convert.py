"""Every model of the zoo: converted, it does what it did, in outputs, dtypes and gradients, and so do its files."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.collections.converted_collection import converted_collections
from recfx.collections.kinds import standard_kind
from recfx.conversion.convert import convert
from recfx.inspect.explain import explain
from recfx.inspect.report import Report
from recfx.models.conversion_record import conversion_of
from tests.drawing.page_data import data_of
from tests.models import ZOO, Case
from tests.models.case import assert_agree, standard_collections
from tests.models.exported import assert_files_answer
from tests.support.refusals import refused

each_model = pytest.mark.parametrize("case", ZOO, ids=[case.name for case in ZOO])


@each_model
def test_a_converted_copy_agrees_and_nothing_else_changes(case: Case, tmp_path: Path) -> None:
    """Verification passes on every model; the sample is run, but not on the user's model. Its files answer, too."""
    with case.around():
        reference, original, sample = case.model(), case.model(), case.sample()
        state = copy.deepcopy(original.state_dict())
        gradients = {name: torch.rand_like(parameter) for name, parameter in original.named_parameters()}
        for name, parameter in original.named_parameters():
            parameter.grad = gradients[name].clone()
        modes, random_state = [module.training for module in original.modules()], torch.get_rng_state()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", recfx.RecfxWarning)
            converted = convert(original, sample)
        told = {one.message.diagnostic.code for one in caught if isinstance(one.message, recfx.RecfxWarning)}
        assert told == ({"never_called"} if case.name == "never_called" else set())
        assert torch.equal(torch.get_rng_state(), random_state)
        assert [module.training for module in original.modules()] == modes
        assert list(original.state_dict()) == list(state)
        for name, value in original.state_dict().items():
            assert torch.equal(value, state[name]), name
        for name, parameter in original.named_parameters():
            assert torch.equal(parameter.grad, gradients[name]), name

        _assert_all_are_converted(original, converted)
        verification = conversion_of(converted).verification
        assert verification is not None
        assert verification.ok
        assert _in_brief(explain(converted)) == EXPECTED[case.name]
        assert explain(original, sample).ok
        paths = [
            {path for one in _drawn(model, tmp_path)["collections"] for path in one["paths"]}
            for model in (original, converted)
        ]
        assert {path for one in explain(original).collections for path in one.paths} <= paths[0]
        assert paths[0] == paths[1]
        assert_agree(reference, converted, case)
        # It shares parameters and buffers with the converted model, which has been through the same calls.
        assert_agree(reference, original, case)
        (tmp_path / "files").mkdir()
        assert_files_answer(converted, case, tmp_path / "files")


@each_model
def test_models_converted_in_place_agree(case: Case) -> None:
    with case.around():
        reference, original = case.model(), case.model()
        converted = convert(original, inplace=True, verify=False)
        # A root that is the collection itself has no parent to patch.
        assert (converted is original) != (standard_kind(original) is not None)
        _assert_all_are_converted(reference, converted)
        assert_agree(reference, converted, case)


@each_model
def test_the_whole_graph_agrees_or_is_refused(case: Case) -> None:
    with case.around():
        reference, original = case.model(), case.model()
        if case.whole_graph:
            with refused(case.whole_graph):
                convert(original, case.sample(), whole_graph=True, verify=False)
            assert_agree(reference, original, case)
            return
        converted = convert(original, case.sample(), whole_graph=True, verify=False)
        _assert_all_are_converted(original, converted)
        assert_agree(_unwrapped(reference), converted, case)


def test_a_report_is_expected_of_every_model() -> None:
    assert list(EXPECTED) == [case.name for case in ZOO]


def _expected_reports() -> dict[str, str]:
    """By model, from a file of names at the margin and indented lines below them."""
    blocks = Path(__file__).with_name("zoo_reports.txt").read_text().split("\n\n")
    return {name: lines for name, _, lines in (block.strip("\n").partition("\n") for block in blocks)}


EXPECTED = _expected_reports()


def _in_brief(report: Report) -> str:
    """A line per collection (names, how it was found, tables, kinds of nodes), and one per reason."""
    lines = []
    for collection in report.collections:
        tables = ", ".join(table.name for table in collection.tables) or "no tables"
        kinds = " ".join(node.kind for node in collection.nodes) or collection.status
        weighted = "weighted, " if collection.is_weighted else ""
        lines.append(f"    {' = '.join(collection.paths) or '(root)'}: {weighted}{collection.found}: {tables}: {kinds}")
    lines += [f"    {reason.severity} {reason.code} at {reason.path or '(root)'}" for reason in report.reasons]
    return "\n".join(lines)


def _drawn(model: nn.Module, folder: Path) -> Any:
    recfx.draw(model, folder / "model.html")
    return data_of(folder / "model.html")


def _assert_all_are_converted(original: nn.Module, converted: nn.Module) -> None:
    assert len(converted_collections(converted)) == len(standard_collections(original)) > 0
    assert not standard_collections(converted)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The whole graph has no wrapper any more: names are those of the module inside."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module
    return getattr(model, "_orig_mod", model)
