"""Collected in a process with ``TRITON_INTERPRET=1`` only: it is read when a kernel is defined."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
