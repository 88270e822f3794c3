"""Kernels: torch references of every operator, C++ for the host in ``csrc/``. Knows nothing of models or graphs.

Nothing is imported, built or loaded here; each family is a module of its own.
"""
