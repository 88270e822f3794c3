"""What is public has an example in its docstring, and every example runs and shows what it says."""

import doctest
import inspect
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import recfx
from recfx.conversion.rows_of_ids import RowsOfIds
from recfx.ir import format_graph
from recfx.planner.plan_file import read_plan, write_plan
from recfx.planner.topology import npu_topology
from tests.support.own_operators import forgotten_afterwards

INHERITED = ("batches_in_flight", "fused_optimizer", "index", "tables_with_index", "weight")
"""What users call of the base classes of collections; the rest is there for recfx and TorchRec."""

OTHERS = (format_graph, npu_topology, read_plan, write_plan, RowsOfIds, RowsOfIds.to_rows)
"""What users import from packages of recfx."""


def test_help_begins_with_a_line_for_all_that_can_be_done() -> None:
    listed = set(re.findall(r"\w+", str(recfx.__doc__).partition("help(")[0]))
    verbs = {name for name in recfx.__all__ if name[0].islower()} | {"TrainPipeline"}
    assert verbs <= listed


def _documented() -> dict[str, Any]:
    """What needs an example, by its name: public functions and classes, and the methods that the classes declare."""
    documented: dict[str, Any] = {f"{other.__module__}.{other.__name__}": other for other in OTHERS}
    for name in recfx.__all__:
        public = getattr(recfx, name)
        if not callable(public):
            continue
        documented[f"recfx.{name}"] = public
        if inspect.isclass(public):
            for method in (*vars(public), *(inherited for inherited in INHERITED if hasattr(public, inherited))):
                value = inspect.getattr_static(public, method)
                is_method = isinstance(value, (classmethod, staticmethod, property, types.FunctionType))
                if is_method and not method.startswith("_") and not hasattr(nn.Module, method):
                    documented[f"recfx.{name}.{method}"] = value
    return documented


DOCUMENTED = _documented()


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names with which all examples begin, which are in the docstring of recfx, in a folder with "model.pt"."""
    module = types.ModuleType("examples")
    sys.modules["examples"] = module  # torch.fx looks up the module of traced classes
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("examples"))
        module.__dict__.update(_run("recfx", recfx, module.__dict__))
        _run("recfx.export", recfx.export, module.__dict__)
        yield module.__dict__
    del sys.modules["examples"]


def _run(name: str, documented: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Run the examples of a docstring with some names, and return the names that there are afterwards."""
    text = inspect.getdoc(documented) or ""
    assert ">>> " in text, f"the docstring of {name} has no example"
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    wrong: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=wrong.append, clear_globs=False)
    assert not wrong, "".join(wrong)
    return test.globs


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if name != "recfx.export"])  # that is the beginning
def test_the_example_shows_what_it_says(name: str, beginning: dict[str, Any]) -> None:
    with forgotten_afterwards():
        _run(name, DOCUMENTED[name], beginning)
