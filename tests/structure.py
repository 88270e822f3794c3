"""The packages of the project, in the order in which they may import each other."""

from __future__ import annotations

# From top to bottom: a package imports from those after it only.
LAYERS = [
    "__init__",
    "__main__",
    "commandline",
    "compat",
    "exporter",
    "conversion",
    "drawing",
    "inspect",
    "checkpoint",
    "pipeline",
    "planner",
    "replacement",
    "verification",
    "discovery",
    "pricing",
    "sharding",
    "modules",
    "serving",
    "nodes",
    "lowering",
    "optim",
    "passes",
    "ir",
    "hashing",
    "hooks",
    "errors",
    "diagnostics",
    "version",
    "kernels",
]
