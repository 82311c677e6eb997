"""Keeps the garbage collector from going through the objects of all imported modules again and again."""

from __future__ import annotations

import gc


def keep_imports_frozen() -> None:
    """Spares the garbage collector all objects that exist now, for good.

    Going through those of torch's modules takes a third of a second, at the start of every training and after each
    run of a pool. A training unfreezes them at its end, so that has no effect in tests.
    """
    gc.unfreeze = lambda: None
    gc.collect()
    gc.freeze()
