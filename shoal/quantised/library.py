"""Imports bitsandbytes, which is an extra."""

from __future__ import annotations

import logging
from typing import Any

from shoal.errors import UserError


def import_bitsandbytes(key: str) -> Any:
    """Returns the package bitsandbytes. Raises UserError, which begins with `key`, if it is not installed or fails."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about a package for inference on CPUs, which nobody asked for
    try:
        import bitsandbytes
        import bitsandbytes.functional
        import bitsandbytes.optim
    except ImportError:
        raise UserError(f"{key}: the package bitsandbytes is missing; run `pip install shoal[quant]`") from None
    except (OSError, RuntimeError) as error:
        raise UserError(f"{key}: bitsandbytes cannot be loaded: {error}; run `python -m bitsandbytes`") from None
    finally:
        logger.setLevel(level)
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_only_once)
    return bitsandbytes


_seen = set[str]()


def _only_once(record: logging.LogRecord) -> bool:
    """Lets each warning of bitsandbytes' layers pass once. It has one about casts in every call of an 8-bit layer."""
    first = record.getMessage() not in _seen
    _seen.add(record.getMessage())
    return first
