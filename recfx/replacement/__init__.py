"""Standard collections replaced by converted ones, around the same parameters."""
