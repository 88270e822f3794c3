"""Fused optimizers: from the optimizers that users attach to the step inside the backward."""
