"""Kernels in Triton on a real device: ``python -m pytest -q tests/ascend/on_device``, where there is a CUDA device.

Every case of ``tests/ascend/cases.py`` is launched there, and every operator is compared with its reference. torch,
Triton, pytest and Hypothesis are enough: neither TorchRec nor FBGEMM is needed. ``RECFX_KERNELS_ON`` names another
device; ``cpu``, with ``TRITON_INTERPRET=1``, shows that these tests run.
"""

from __future__ import annotations

from tests.support import without_torchrec

without_torchrec.prepare()
