"""Converting a model and back: the pipeline from one end to the other, whole graphs, and the public entry points."""
