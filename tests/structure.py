"""The packages of the project, and the packages inside them, in the order in which they may import each other."""

# From top to bottom: a package imports from those after it only.
LAYERS = [
    "__init__",
    "__main__",
    "commandline",
    "commandline.doctor",
    "api",
    "compat",
    "exporter",
    "exporter.serving",
    "inspect.drawing",
    "inspect",
    "conversion",
    "checkpoint",
    "pipeline",
    "planner",
    "planner.pricing",
    "models",
    "collections.sharding",
    "collections",
    "runtime",
    "lowering",
    "optim",
    "passes",
    "ir",
    "hashing",
    "errors",
    "kernels",
    "kernels.lookup",
    "kernels.step",
    "kernels.route",
    "kernels.index",
    "kernels.build",
    "versions",
]


def layer(module: str) -> str:
    """``collections.sharding`` for ``recfx.collections.sharding.plan``, ``ir`` for ``recfx.ir.tables``."""
    parts = module.split(".")[1:] or ["__init__"]
    inner = ".".join(parts[:2])
    return inner if inner in LAYERS else parts[0]
