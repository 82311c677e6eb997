"""Messages of other libraries that nobody asked for."""

from __future__ import annotations

import logging
import warnings


def quiet_imports() -> None:
    """Hides what torchao and bitsandbytes print when they are imported: which of their libraries they cannot load, and
    what is deprecated.

    transformers and peft import them whether or not they are used.
    """
    for name in ("torchao", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_not_of_torchao)
    warnings.filterwarnings("ignore", module=r"torchao\b")


def _not_of_torchao(record: logging.LogRecord) -> bool:
    """Returns False for the warning (torch 2.13) that enums need not be registered, which torchao does."""
    return "register_constant() on Enum" not in record.getMessage()
