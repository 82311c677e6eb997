"""Where text comes from: the standard library, files, or a Hugging Face dataset, as a stream of documents."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.hub import hub
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.data.text import TextDataset

_PIECE_BYTES = 1 << 20
_TESTS_AND_PACKAGES = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_DEFAULT_CONFIGS = {"wikitext": "wikitext-2-raw-v1", "Salesforce/wikitext": "wikitext-2-raw-v1"}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order. The contents of `files`, in order, and `selection` decide what they are."""

    files: list[Path]
    selection: str = ""
    rows: Iterable[str] | None = None
    """The documents where they are not simply the files."""

    def documents(self) -> Iterator[Iterable[bytes]]:
        """Each document in pieces, so that none has to fit into memory."""
        return map(_pieces, self.files) if self.rows is None else ([row.encode()] for row in self.rows)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while lines := file.readlines(_PIECE_BYTES):  # whole lines: a piece never ends inside a character
            yield b"".join(lines)


def load_corpora(config: TextDataset) -> tuple[Corpus, Corpus | None]:
    """The text to train on, and the text to evaluate on where it is separate."""
    if config.name == "stdlib":
        return Corpus(_stdlib_files()), None
    if config.name == "text":
        return Corpus(_expand([config.files] if isinstance(config.files, str) else config.files or [])), None
    return _load_rows(config)


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    inside = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in inside if _TESTS_AND_PACKAGES.isdisjoint(path.parts)]
    return [root / path for path in sorted(kept, key=Path.as_posix)]


def _expand(patterns: list[str]) -> list[Path]:
    """Files as they are, folders and globs as the sorted files in them; nothing twice."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            inside = {p: p.relative_to(path).parts for p in path.rglob("*")}
            matches = [p for p, parts in inside.items() if not any(part.startswith(".") for part in parts)]
        else:  # a file is looked for first: its name may have brackets, which mean something else in a glob
            matches = [path] if path.is_file() else [*map(Path, glob.glob(str(path), recursive=True))]  # noqa: PTH207
        files = sorted(p for p in matches if p.is_file())
        if not files:
            raise UserError(f"dataset.files: {pattern!r} is no file, no folder with files and matches none")
        found.update(dict.fromkeys(files))
    return list(found)


def _load_rows(config: TextDataset) -> tuple[Corpus, Corpus | None]:
    local = Path(config.name).expanduser()
    subset = config.config or _DEFAULT_CONFIGS.get(config.name)
    with hub("dataset.name", config.name, "datasets", local=local.is_dir()) as datasets:
        builder = datasets.load_dataset_builder(str(local) if local.is_dir() else config.name, subset)
        builder.download_and_prepare()
        train = _rows(builder, config.split, config.text_column)
        held_out = "validation" in builder.info.splits and "validation" not in config.split and config.eval_fraction > 0
        return train, _rows(builder, "validation", config.text_column) if held_out else None


def _rows(builder: Any, split: str, column: str) -> Corpus:
    try:
        data = builder.as_dataset(split=split)
    except ValueError as error:
        raise UserError(f"dataset.split: {error}") from error
    texts = [name for name, feature in data.features.items() if getattr(feature, "dtype", "").endswith("string")]
    if column not in texts:
        raise UserError(f"dataset.text_column: {column!r} is no column of text; there is {', '.join(texts) or 'none'}")
    files = [Path(file["filename"]) for file in data.cache_files]
    rows = (row[column] for row in data.select_columns(column))
    return Corpus(files, f"{split}/{column}", filter(None, rows))
