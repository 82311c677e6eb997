"""Recognises files that hold records instead of text, such as JSON lines, and paths in the place of a Hub name."""

from __future__ import annotations

import json
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from shoal.errors import UserError

READERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}
"""The kinds of local files that the package datasets reads, by suffix."""
_TEXT_SUFFIXES = {".txt", ".md", ".py"}
_LONGEST_LINE = 1 << 20


def refuse_records(path: Path) -> None:
    """Raises UserError if a file that should be text holds JSON lines or Parquet: a model would learn their syntax."""
    if (keys := _keys_of_json_lines(path)) is None and path.suffix.lower() != ".parquet":
        return
    texts = f" and dataset.text_column to one of {', '.join(keys)}" if keys else ""
    kind = "Parquet" if keys is None else "JSON lines"
    raise UserError(
        f"dataset.files: {path} holds {kind}, and a model would learn their syntax; set dataset.name = {str(path)!r} "
        f"in place of dataset.files{texts}"
    )


def reader_of(name: str) -> str | None:
    """Returns the reader of the package datasets for `dataset.name` if that is a local file, else None.

    Raises UserError for a file of text, and for a path that does not exist: the Hub would be asked for it.
    """
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    if path.is_file():
        if suffix not in READERS:
            raise UserError(
                f"dataset.name = {name!r} is a file; for text set dataset.name = 'text' and dataset.files = {name!r}; "
                f"records are read from {', '.join(READERS)}"
            )
        return READERS[suffix]
    if not path.exists() and (looks_like_path(name) or suffix in {*READERS, *_TEXT_SUFFIXES}):
        raise UserError(f"dataset.name = {name!r}: no such file or folder{near_names(name)}; correct the path")
    return None


def looks_like_path(name: str) -> bool:
    """Returns whether a value can be a path alone: names on the Hugging Face Hub are `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name or " " in name


def near_names(name: str) -> str:
    """Returns the names beside a path that does not exist which may be meant, as a part of a message; or nothing."""
    path = Path(name).expanduser()
    with suppress(OSError):
        beside = {entry.name: entry for entry in path.parent.iterdir()}
        return "".join(f" (did you mean {beside[near]}?)" for near in get_close_matches(path.name, beside, n=1))
    return ""


def _keys_of_json_lines(path: Path) -> list[str] | None:
    """Returns the keys with texts if the first two lines of a file are JSON objects, else None.

    One such line suffices if the name says so: a source tree has other small JSON files.
    """
    with path.open("rb") as file:
        lines = [line for _ in range(2) if (line := file.readline(_LONGEST_LINE)).strip()]
    needed = 1 if path.suffix.lower() in (".jsonl", ".ndjson") else 2
    try:
        rows = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return None
    if len(rows) < needed or not all(isinstance(row, dict) for row in rows):
        return None
    return [key for key, value in rows[0].items() if isinstance(value, str)]
