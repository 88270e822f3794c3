"""Kernels in Triton on a CUDA device: against torch's ``embedding_bag``, and FBGEMM's CUDA operators if they are there.

``python -m tests.bench triton --json`` is the whole of it. Times are the device's, between two events, after a kernel
that only waits, so that the host is ahead with its launches. ``GB/s`` counts the bytes that have to be read and
written, as the file of each benchmark says, and is given as a share of what a copy on the same device moves in the same
run (bytes read and written, too).

With ``TRITON_INTERPRET=1``, ``--device cpu --quick`` shows in seconds that all of it runs; it measures nothing.
"""

from tests.support import without_torchrec

without_torchrec.prepare()
