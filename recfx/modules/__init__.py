"""The converted collection, and what it is made of and shares with the sharded one."""
