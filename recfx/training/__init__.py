"""Training: fused optimizers, seen from the user's side."""
