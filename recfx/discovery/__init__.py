"""Finding the collections of any model, running and tracing it on a sample, and recording what was converted."""
