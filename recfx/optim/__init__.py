"""Fused optimizers: from those that users attach to the step inside the backward; ``rules/`` has one file per rule."""
