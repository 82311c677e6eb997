"""The config files that come with the package, in the folder `shoal/configs`."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from shoal.config.yaml import format_value, read_yaml
from shoal.errors import UserError

FOLDER = Path(__file__).parent.parent / "configs"
_JSON_FOLDER = "configs/"
"""How the shipped files name a JSON beside them: as it is seen from the folder in which a clone's commands run."""


def shipped_configs() -> dict[str, str]:
    """Returns the name of every config that can be trained, with a sentence that describes it."""
    return {path.stem: _description(path) for path in sorted(FOLDER.glob("*.yaml"))}


def _description(path: Path) -> str:
    """Returns the comment at the top of a file in one line."""
    lines = path.read_text().splitlines()
    first_key = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:first_key])


def shipped_config(name: str) -> Path:
    """Returns the path of the config with this name."""
    names = shipped_configs()
    name = name.removeprefix(_JSON_FOLDER).removesuffix(".yaml")
    if name not in names:
        near = "".join(f"; did you mean {meant!r}?" for meant in get_close_matches(name, names, n=1))
        raise UserError(f"{name!r:.200}: no config with this name comes with shoal{near or '; see `shoal configs ls`'}")
    return FOLDER / f"{name}.yaml"


def copy_config(name: str, to: Path, force: bool = False) -> list[Path]:
    """Copies a config and all files that it refers to; returns the copies, that of the config first.

    `to` is a folder, or the name of the new file if it ends in .yaml or .yml. The other files keep their places
    relative to the config. An existing file with other contents is replaced only with `force`.
    """
    source = shipped_config(name)
    target = to if to.suffix in (".yaml", ".yml") else to / source.name
    folder = target.parent
    copies = {}
    for path in _with_references(source):
        place = target if path == source else folder / path.relative_to(FOLDER)
        copies[place] = _naming_json_in(folder, path.read_text())
    for place, text in copies.items():
        _check_free(place, text, force)
    for place, text in copies.items():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        except OSError as error:
            raise UserError(f"{place} cannot be written: {error.strerror}; choose another folder") from None
    return list(copies)


def _naming_json_in(folder: Path, text: str) -> str:
    """Returns the text of a config with the new path of the JSON that it names."""
    pattern = rf"(?<=config_file: ){_JSON_FOLDER}(\S+)"
    return re.sub(pattern, lambda found: format_value((folder / found[1]).as_posix()), text)


def _with_references(path: Path) -> list[Path]:
    """Returns a config, the files that it extends, and the DeepSpeed JSON that it names."""
    tree, _ = read_yaml(path)
    bases = tree.get("extends", [])
    found = [path]
    for base in [bases] if isinstance(bases, str) else bases:
        found += _with_references(path.parent / base)
    json = tree.get("distributed", {}).get("deepspeed", {}).get("config_file")
    return [*dict.fromkeys(found), *([FOLDER / json.removeprefix(_JSON_FOLDER)] if json else [])]


def _check_free(place: Path, text: str, force: bool) -> None:
    if place.is_dir() or (place.exists() and not force and place.read_bytes() != text.encode()):
        raise UserError(f"{place} exists and is different; choose another folder, or replace it with --force")
