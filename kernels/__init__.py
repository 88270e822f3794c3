"""Kernels: a torch reference of every operator, and C++ for the host in ``csrc/``. Independent of models and graphs.

Importing this package imports, builds and loads nothing; each family of operators is its own module.
"""
