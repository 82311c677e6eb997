"""What comes from the Hugging Face libraries, with their many ways to fail told in one line."""

from __future__ import annotations

import importlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import UserError

_REACH_SECONDS = 5.0


@contextmanager
def hub(key: str, name: str, package: str, *, local: bool) -> Iterator[Any]:
    """The package, and around its use a translation of what it raises. Unless `local`, whether the Hub can be reached
    is tried first: without a network the libraries alone would retry for minutes. What they cached still works then.
    """
    try:
        module = importlib.import_module(package)
        from huggingface_hub import constants
    except ImportError:
        raise UserError(f"{key}: {name!r} needs the package {package}; run `pip install shoal[hf]`") from None
    reached = local or (not constants.HF_HUB_OFFLINE and _hub_answers(constants.ENDPOINT))
    if not reached:
        constants.HF_HUB_OFFLINE = True
        if package == "datasets":
            module.config.HF_HUB_OFFLINE = True
    try:
        yield module
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error).split())[:300] if reached else "the Hugging Face Hub cannot be reached"
        raise UserError(
            f"{key}: cannot load {name!r}: {reason}; give a local path or the name of one on the Hub"
        ) from error


def snapshot(key: str, name: str, revision: str | None, patterns: list[str], *, local_only: bool) -> Path:
    """The folder of a Hub repository's files, downloaded unless `local_only`; what was cached is found without a
    network."""
    with hub(key, name, "huggingface_hub", local=local_only) as huggingface_hub:
        offline = local_only or huggingface_hub.constants.HF_HUB_OFFLINE
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, local_files_only=offline
        )
    return Path(folder)


def _hub_answers(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
