"""Keeps the garbage collector from going through the objects of all imported modules again and again."""

from __future__ import annotations

import gc
from functools import cache


@cache
def keep_imports_frozen() -> None:
    """Spares the garbage collector all objects that exist now, for good.

    Going through those of torch's modules takes a third of a second, at the start of every training and after each run
    of a pool. A training freezes what exists at its start and unfreezes it at its end; neither has an effect in tests,
    so that the imports stay frozen, and models and process groups that are part of a cycle are collected.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
