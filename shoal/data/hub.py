"""Access to the Hugging Face libraries. Their many kinds of errors become one line for the user."""

from __future__ import annotations

import importlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.data.local_files import looks_like_path, near_names
from shoal.errors import UserError, one_line

_REACH_SECONDS = 5.0


@contextmanager
def hub(key: str, name: str, package: str, *, local: bool) -> Iterator[Any]:
    """Yields the imported package, and turns every error that its use raises into a UserError about config key `key`.

    Unless `local` is true, a path that does not exist is refused, and this first checks that the Hub can be reached:
    without a network the libraries alone would retry for minutes. If it cannot be reached, the libraries use only what
    they have cached.
    """
    try:
        module = importlib.import_module(package)
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError
    except ImportError:
        raise UserError(f"{key} = {name!r}: this needs the package {package}; run `pip install shoal[hf]`") from None
    if not local:
        refuse_path(key, name)
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
        if not reached:
            kind = " --repo-type dataset" if package == "datasets" else ""
            raise UserError(
                f"{key} = {name!r}: no such folder is here{near_names(name)}, and the Hugging Face Hub cannot be "
                f"reached; run `hf download {name}{kind} --local-dir FOLDER` on a machine that reaches it, copy the "
                "folder, and give its path"
            ) from error
        if any(isinstance(cause, GatedRepoError) for cause in (error, error.__cause__)):
            raise UserError(
                f"{key} = {name!r}: a licence has to be accepted before it is downloaded; accept it on the page of "
                f"{name} on huggingface.co, then run `hf auth login`"
            ) from error
        raise UserError(
            f"{key} = {name!r}: it cannot be loaded: {one_line(error)}; give a local path or a name on the Hugging "
            "Face Hub"
        ) from error


def refuse_path(key: str, name: str) -> None:
    """Raises UserError for a value that can be a path alone, and so is the path of something that does not exist."""
    if looks_like_path(name):
        raise UserError(
            f"{key} = {name!r}: there is no such file or folder{near_names(name)}; correct the path, or give a name on "
            "the Hugging Face Hub"
        )


def snapshot(key: str, name: str, revision: str | None, patterns: list[str], *, local_only: bool) -> Path:
    """Returns the folder with the files of a Hub repository. Downloads them unless `local_only` is true or the Hub
    cannot be reached; then it uses what is cached."""
    refuse_path(key, name)
    with hub(key, name, "huggingface_hub", local=local_only) as huggingface_hub:
        offline = local_only or huggingface_hub.constants.HF_HUB_OFFLINE
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=offline
            )
        )


def _hub_answers(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_REACH_SECONDS).close()
    except urllib.error.HTTPError:  # an error status is an answer, too
        return True
    except OSError:
        return False
    return True
