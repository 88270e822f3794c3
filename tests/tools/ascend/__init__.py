"""What checks the checks of ``tests/ascend``, and a model of the chips from what its compilers make of the kernels."""
