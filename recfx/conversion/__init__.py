"""Converting a model and undoing it: the whole pipeline, whole-model graphs, and the public entry points."""
