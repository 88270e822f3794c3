"""A simulated NPU: the real ``torch_npu`` on libraries that stand in for CANN, with the numbers of the CPU's kernels.

Nothing here is CANN's, and nothing computed here was computed by an NPU. What it shows: which operators a step calls
on device ``npu``, on which device tensors are, that copies and streams are asked for in an order that works, and that
the code around the kernels needs no edit for another device. What it cannot show: numerics, limits and speed of the
device's kernels, races, HCCL.
"""
