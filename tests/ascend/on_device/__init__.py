"""Kernels in Triton, and models that use them, on a real device: ``python -m pytest -q tests/ascend/on_device``.

It runs on an NPU or a CUDA device, whichever is there; ``RECFX_KERNELS_ON`` names another one, such as ``npu:1``, or
``cpu``, which shows, with ``TRITON_INTERPRET=1``, that these tests run. Every case of ``tests/ascend/cases.py`` is
launched there, every operator is compared with its reference, and models train and are exported as on the CPU. For the
kernels and operators, torch, Triton, pytest and Hypothesis are enough: without TorchRec, models are left out.
"""

from tests.support import without_torchrec

without_torchrec.prepare()
