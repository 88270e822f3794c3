"""Lowering: from graph nodes to kernels. There is one registry (``registry.py``), and one file or folder per target."""
