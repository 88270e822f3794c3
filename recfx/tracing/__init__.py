"""Running and tracing a model on a sample."""
