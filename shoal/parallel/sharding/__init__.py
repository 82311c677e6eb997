"""Sharded parameters: the units fully_shard gathers, and the local part each rank holds and updates."""
