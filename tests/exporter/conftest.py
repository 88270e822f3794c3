"""What the tests of this package share: a trained model, its file, and the C++ server."""

import functools
import logging
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch._export.serde import schema, serialize

import recfx
from recfx.exporter.report import ExportReport
from tests.exporter import cpp_server
from tests.exporter.hashed_models import call, trained

UsualExport = Callable[[bool, Any], ExportReport]
"""From whether there are weights and how rows are stored to the report of the file, which is written once."""


@pytest.fixture(scope="package", autouse=True)
def _annotations_are_read_once() -> Iterator[None]:
    """When it loads a program, torch reads the annotations of its classes again for every value of a file."""
    once: Callable[[Any], dict[str, Any]] = functools.cache(
        lambda asked: typing.get_type_hints(asked, globalns=vars(schema))
    )
    remembering = types.ModuleType("typing")
    vars(remembering).update(vars(typing), get_type_hints=lambda asked, **_: once(asked))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialize, "typing", remembering)
        yield


@pytest.fixture(scope="package", autouse=True)
def _tracers_warn_of_nothing() -> None:
    logging.getLogger("torch.fx").setLevel(logging.ERROR)


@pytest.fixture(scope="package")
def model_of() -> dict[bool, nn.Module]:
    """Trained models by whether their batches have weights; no test changes them."""
    return {False: trained(), True: trained(is_weighted=True)}


@pytest.fixture(scope="package")
def model(model_of: dict[bool, nn.Module]) -> nn.Module:
    """A trained model, which no test changes."""
    return model_of[False]


@pytest.fixture(scope="package")
def usual_export(model_of: dict[bool, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> UsualExport:
    """Exports these models to the usual files: in TorchScript, with stock operators, for the CPU."""
    folder = tmp_path_factory.mktemp("exported")
    reports: dict[str, ExportReport] = {}

    def export(is_weighted: bool, quantize: Any) -> ExportReport:
        key, sample = f"{is_weighted}, {quantize}", call(6, is_weighted=is_weighted)
        if key not in reports:
            path = folder / f"{len(reports)}.pt"
            reports[key] = recfx.export(model_of[is_weighted], path, sample, quantize=quantize)
        return reports[key]

    return export


@pytest.fixture(scope="package")
def file(usual_export: UsualExport) -> Path:
    """The file of ``model`` with its rows as they are."""
    return usual_export(False, None).path


@pytest.fixture(scope="package")
def program() -> Path:
    """The C++ server."""
    cpp_server.require()
    return cpp_server.build()


@pytest.fixture(scope="package")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What reads files and requests in the C++ server, with sanitizers."""
    cpp_server.require()
    return cpp_server.build_formats(tmp_path_factory.mktemp("formats"))
