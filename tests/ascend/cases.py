"""The compiled forms of all kernels."""

from tests.ascend import (
    bag_offsets_cases,
    bucketize_cases,
    find_rows_cases,
    fused_optimizer_cases,
    lookup_cases,
    row_initialization_cases,
    select_keys_cases,
    step_order_cases,
)
from tests.ascend.kernel_case import KernelCase

CASES: tuple[KernelCase, ...] = (
    *lookup_cases.cases(),
    *fused_optimizer_cases.cases(),
    *lookup_cases.gradient_cases(),
    *lookup_cases.gpu_cases(),
    *find_rows_cases.cases(),
    *bucketize_cases.cases(),
    *row_initialization_cases.cases(),
    *step_order_cases.cases(),
    *bag_offsets_cases.cases(),
    *select_keys_cases.cases(),
)
ON_ASCEND = tuple(case for case in CASES if not case.on_gpu)
BY_NAME = {case.name: case for case in CASES}
