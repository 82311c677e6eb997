"""Functions and classes by the names and signatures that people know from other code. `shoal.distributed` has them all.

They are thin: what they do is done by strategies, `Loop` and checkpoints. docs/familiar.md lists them.
"""
