"""The converted collection, the parts it is made of, and what it shares with the sharded one."""
