"""Fused optimizers: the optimizers that users attach, run inside the backward; ``rules/`` has one file per rule."""
