"""Why single tests fail on older sets, and what of a run has no such cause."""

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[3]
SETS = runpy.run_path(str(ROOT / "recfx" / "versions" / "sets.py"))["SETS"]  # `import recfx` would import torch
"""The sets, as ``recfx.versions.sets`` has them."""

_NO_PROXY = (
    "torch 2.7's modules take no proxy as a buffer, so a module that counts its calls stays as it is (`untraceable`), "
    "and TorchScript compiles its own code (`keeps_state`)."
)
_NO_META = "FBGEMM 1.2 for CPUs cannot make TorchRec's fused collections on meta, as a plan in this test needs them."
_NO_OPERATOR = (
    "FBGEMM 1.4 for CPUs and older ones lack an operator, linearize_cache_indices, that TorchScript asks for when it "
    "compiles TorchRec's own quantized tables; recfx is not in such a model."
)
_NO_SIZES = (
    "torch.fx of torch 2.7 traces no function that takes a size of a proxy beside other sizes, such as "
    "torch.reshape(x, (x.size(0), -1)); converted models have `untraceable`, as plain ones have an error."
)
_NO_LISTS = (
    "Inside torch.func, torch 2.9 and older ones cannot read a tensor into a list, as TorchRec does to each batch: "
    "plain collections do not run there either."
)
_NO_WRAPPER = (
    "FBGEMM 1.2 for CPUs has no table with an optimizer and without pooling, with which the benchmark compares."
)
_NO_LENGTH = (
    "TorchRec 1.5's KeyedJaggedTensor.from_jt_dict takes the len of a proxy, which torch.fx does not trace: the model "
    "is walked, and has no whole graph."
)
_NO_MIXED = "TorchRec 1.4's TestMixedSequenceOverArch has layers too narrow for their input: plain models do not run."
_LETS_DENSE = "TorchRec 1.5's planner and older ones let a table that is not data-parallel have kernel dense."
CAUSES: Mapping[str, Mapping[str, str]] = {
    "2.7": {
        "tests/conversion/test_convert.py::test_a_converted_copy_agrees_and_nothing_else_changes[batch": _NO_PROXY,
        "tests/runtime/test_base.py::test_the_graph_of_a_converted_model_is_that_of_the_standard_one[dlrm_": _NO_SIZES,
        "tests/hashing/test_index.py::test_torch_compile_keeps_the_operators_whole": (
            "torch.compile of torch 2.7 does not call the properties of a named tuple, such as an index's policy."
        ),
        "tests/passes/test_fuse_hash_lookup.py::test_inside_torch_func_it_gives_gradients": _NO_LISTS,
        "tests/runtime/test_batch_checks.py::test_torch_func": _NO_LISTS,
        "tests/runtime/test_input_dist.py::test_equals_torchrec": (
            "TorchRec 1.2 cannot distribute an empty batch, with which recfx is compared."
        ),
        "tests/test_bench.py::test_prints_one_json_object_a_line[export]": _NO_OPERATOR,
        "tests/test_bench.py::test_prints_one_json_object_a_line[sequence]": _NO_WRAPPER,
        "tests/planner/test_sharder.py::test_kernels_that_the_planner_refuses": _LETS_DENSE,
        "tests/planner/test_plan.py::test_what_recfx_does_not_shard_is_planned_where_torchrec_can_run_it": _NO_META,
        "tests/planner/test_priced_plan.py::test_tables_on_one_rank_that_recfx_does_not_shard_take_their": _NO_META,
    },
    "2.9": {
        "tests/conversion/test_convert.py::test_a_converted_copy_agrees_and_nothing_else_changes[mixed_": _NO_MIXED,
        "tests/conversion/test_convert.py::test_models_converted_in_place_agree[mixed_": _NO_MIXED,
        "tests/conversion/test_convert.py::test_the_whole_graph_agrees_or_is_refused[mixed_": _NO_LENGTH,
        "tests/passes/test_fuse_hash_lookup.py::test_inside_torch_func_it_gives_gradients": _NO_LISTS,
        "tests/planner/test_sharder.py::test_kernels_that_the_planner_refuses": _LETS_DENSE,
        "tests/runtime/test_base.py::test_the_graph_of_a_converted_model_is_that_of_the_standard_one[mi": _NO_LENGTH,
        "tests/runtime/test_batch_checks.py::test_torch_func": _NO_LISTS,
        "tests/test_bench.py::test_prints_one_json_object_a_line[export]": _NO_OPERATOR,
    },
    "2.10": {
        "tests/conversion/test_convert.py::test_a_converted_copy_agrees_and_nothing_else_changes[mixed_": _NO_LENGTH,
        "tests/conversion/test_convert.py::test_the_whole_graph_agrees_or_is_refused[mixed_": _NO_LENGTH,
        "tests/planner/test_sharder.py::test_kernels_that_the_planner_refuses": _LETS_DENSE,
        "tests/runtime/test_base.py::test_the_graph_of_a_converted_model_is_that_of_the_standard_one[mi": _NO_LENGTH,
    },
}
"""For each set, why a test fails there, by its name or how that begins. A failure without one is a bug of recfx."""


def failed(xml: Path) -> list[str]:
    """The tests that failed, and the files that could not be collected, by what pytest has written."""
    names = set()
    for case in ElementTree.parse(xml).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            module = case.get("classname") or case.get("name", "")
            file = re.sub(r"^(.*?\btest_\w+).*", r"\1", module).replace(".", "/") + ".py"  # a module, or a class in one
            names.add(f"{file}::{case.get('name')}" if case.get("classname") else file)
    return sorted(names)


def cause(name: str, test: str) -> str:
    """Why a test fails on the set of this name; ``""`` if nobody knows."""
    return next((why for begin, why in CAUSES.get(name, {}).items() if test.startswith(begin)), "")
