"""What ``import torch`` runs in a process with a simulated NPU, through torch's entry points for devices.

So a script sees the device as it would see a real one: it imports torch, and nothing else.
"""


def autoload() -> None:
    """Import torch_npu, give its operators the CPU's kernels, and its group of processes gloo's collectives."""
    import torch_npu  # noqa: F401

    from tests.ascend.npu_runtime import simulated_group, simulated_operators

    simulated_operators.install()
    simulated_group.install()
