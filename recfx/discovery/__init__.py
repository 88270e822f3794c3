"""Finding the collections of any model, and saying which of them can be converted."""
