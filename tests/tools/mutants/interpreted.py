"""Which tests judge a file of kernels in Triton: single ones, as it takes minutes to interpret all kernels."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

_OTHERS = {
    "find_rows": ["operators"],
    "bucketize": ["operators"],
    "bag_offsets": ["batches"],
    "row_initialization": ["batches"],
    "select_keys": ["batches"],
    "step_order": ["batches"],
    "mix64": ["operators", "batches"],
    "quantized_lookup": ["operators", "files"],
    "per_sample_weights": ["operators", "targets"],
}
"""Tests of ``test_interpreted_targets``, by the stem of a file; those of lookups and steps are the others."""
_PRINT_PLACES = """\
import json
from tests.ascend.cases import CASES
print(json.dumps({case.name: [case.kernel, *map(str, case.constexprs.values())] for case in CASES}))
"""


def tests_that_interpret(path: Path) -> list[str]:
    """The compiled forms that need the file, interpreted and then between guard pages; operators and models that do."""
    module = _module(path)
    kernels = [module, *(_module(file) for file in Path("kernels").rglob("*_triton.py") if module in file.read_text())]
    forms = [name for name, places in _places_of_forms().items() if not places.isdisjoint(kernels)]
    others = _OTHERS.get(path.stem.removesuffix("_triton"), ["targets"])
    levels = ("interpreted.py::test_answers_as_its_reference", "linalg.py::test_touches_nothing_outside_its_arguments")
    return [
        *(f"tests/ascend/test_{level}[{name}]" for level in levels for name in forms),
        *(f"tests/ascend/test_interpreted_targets.py::test_as_every_other_target[{name}]" for name in others),
    ]


@functools.cache
def _places_of_forms() -> dict[str, set[str]]:
    """The modules of each form. Another process imports them: that of the mutants stays without recfx."""
    printed = subprocess.run([sys.executable, "-c", _PRINT_PLACES], capture_output=True, check=True, text=True).stdout
    return {name: {place.partition(":")[0] for place in places} for name, places in json.loads(printed).items()}


def _module(path: Path) -> str:
    module = ".".join(path.with_suffix("").parts)
    return module if path.parts[0] == "recfx" else f"recfx.{module}"
