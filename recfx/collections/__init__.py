"""The converted collection, the parts it is made of, what it shares with the sharded one; what objects refer to."""
