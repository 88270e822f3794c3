"""The modules that the nodes of the graph call."""
