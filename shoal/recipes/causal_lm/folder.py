"""The folder with the weights that recipe causal_lm starts from."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.data.hub import snapshot
from shoal.errors import UserError


def fetch_folder(name: str, revision: str | None, with_code: bool, local_only: bool = False) -> Path:
    """The folder of this name, or that of a repository on the Hub, downloaded unless `local_only`."""
    if is_folder(name):
        return Path(name).expanduser()
    if name.startswith(("/", ".", "~")):
        raise UserError(f"model.name: there is no folder {name}")
    patterns = ["model*.safetensors", "*.json", *(["*.py"] if with_code else [])]
    return snapshot("model.name", name, revision, patterns, local_only=local_only)


def is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir()


def safetensors_in(folder: Path) -> tuple[Path, ...]:
    """The files of weights in a folder that transformers saved."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise UserError(f"model.name: {index} is damaged") from None
        for name in names:
            if not (folder / name).is_file() or Path(name).name != name:
                raise UserError(f"model.name: {index} names {name!r}, which is not in {folder}")
        return tuple(folder / name for name in names)
    if single.exists():
        return (single,)
    pickles = any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir())
    what = "only pickles, which may hold code and are not opened" if pickles else "no weights"
    raise UserError(f"model.name: {folder} has {what}; save the model as model.safetensors")
