"""Kernels taken as far towards an Ascend NPU as is possible without one."""
