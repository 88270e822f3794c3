"""Following what Python objects refer to, also past the attributes of modules."""
