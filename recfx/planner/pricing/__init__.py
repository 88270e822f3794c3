"""What each node of a graph costs: bytes, flops and residents as expressions, and times on known hardware."""
