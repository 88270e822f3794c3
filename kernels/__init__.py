"""Kernels: a torch reference of every operator, and C++ for the host in ``csrc/``. They know nothing of models or
graphs.

Importing this package imports, builds and loads nothing; each family of operators is its own module.
"""
