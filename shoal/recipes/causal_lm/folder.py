"""Finds the folder with the weights that recipe causal_lm starts from, and the files in it."""

from __future__ import annotations

from pathlib import Path

from shoal.data.hub import snapshot
from shoal.errors import UserError
from shoal.weights.from_files import weight_files


def fetch_folder(name: str, revision: str | None, with_code: bool, local_only: bool = False) -> Path:
    """Returns the folder with this name, or the folder of a repository on the Hub.

    The repository is downloaded first, unless `local_only`; `with_code` also downloads its Python files.
    """
    if is_folder(name):
        return Path(name).expanduser()
    patterns = ["model*.safetensors", "*.json", *(["*.py"] if with_code else [])]
    return snapshot("model.name", name, revision, patterns, local_only=local_only)


def is_folder(name: str) -> bool:
    """Returns whether `model.name` is a local folder."""
    return Path(name).expanduser().is_dir()


def safetensors_in(folder: Path) -> tuple[Path, ...]:
    """Returns the files of weights in a folder that transformers saved. Raises UserError if it has no safetensors."""
    if files := weight_files(folder, "model.name", "download it again"):
        return tuple(files)
    pickles = any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir())
    contents = "only pickles, which may hold code and are not opened" if pickles else "no weights"
    raise UserError(f"model.name: {folder} has {contents}; save the model as model.safetensors")
