"""recfx."""
