"""Where text comes from: Python's standard library, files, or a Hugging Face dataset, as a sequence of documents."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.hub import hub
from shoal.data.local_files import reader_of, refuse_records
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.data.text import TextDataset

_PIECE_BYTES = 1 << 20
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_DEFAULT_CONFIGS = {"wikitext": "wikitext-2-raw-v1", "Salesforce/wikitext": "wikitext-2-raw-v1"}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order. Two corpora are equal if the contents of their `files`, in order, and their
    `selection` are equal."""

    files: list[Path]
    selection: str = ""
    """Which part of the files is used: the split and column of a Hugging Face dataset."""
    rows: Iterable[str] | None = None
    """The documents, if they are not simply the files."""

    def documents(self) -> Iterator[Iterable[bytes]]:
        """Returns each document as an iterator of pieces, so that no document has to fit into memory."""
        return map(_pieces, self.files) if self.rows is None else ([row.encode()] for row in self.rows)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while lines := file.readlines(_PIECE_BYTES):  # whole lines, so that a piece never ends inside a character
            yield b"".join(lines)


def load_corpora(config: TextDataset) -> tuple[Corpus, Corpus | None]:
    """Returns the text for training, and the text for evaluation if the dataset has a separate split for it."""
    if config.name == "stdlib":
        return Corpus(_stdlib_files()), None
    if config.name == "text":
        return Corpus(_list_files([config.files] if isinstance(config.files, str) else config.files or [])), None
    return _load_hugging_face(config)


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted((path.relative_to(root) for path in root.rglob("*.py")), key=Path.as_posix)
    return [root / path for path in paths if _SKIPPED_FOLDERS.isdisjoint(path.parts)]


def _list_files(patterns: list[str]) -> list[Path]:
    """Returns the files that the patterns name: files as they are, folders and globs as the sorted files in them. A
    file that several patterns name appears once; hidden files of a folder are left out."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            parts_of = {p: p.relative_to(path).parts for p in path.rglob("*")}
            matches = [p for p, parts in parts_of.items() if not any(part.startswith(".") for part in parts)]
        else:  # tried as a file first: a file name may contain brackets, which mean something else in a glob
            matches = [path] if path.is_file() else [*map(Path, glob.glob(str(path), recursive=True))]  # noqa: PTH207
        files = sorted(p for p in matches if p.is_file())
        if not files:
            raise UserError(
                f"dataset.files = {pattern!r}: no such file, no folder with files, and no match as a glob; correct the "
                "path"
            )
        for file in files:
            refuse_records(file)
        found.update(dict.fromkeys(files))
    return list(found)


def _load_hugging_face(config: TextDataset) -> tuple[Corpus, Corpus | None]:
    local, reader = Path(config.name).expanduser(), reader_of(config.name)
    with hub("dataset.name", config.name, "datasets", local=local.exists()) as datasets:
        if reader:
            builder = datasets.load_dataset_builder(reader, config.config, data_files=str(local))
        else:
            name = str(local) if local.is_dir() else config.name
            builder = datasets.load_dataset_builder(name, config.config or _DEFAULT_CONFIGS.get(config.name))
        builder.download_and_prepare()
        train = _load_split(builder, config.split, config.text_column)
        held_out = "validation" in builder.info.splits and "validation" not in config.split and config.eval_fraction > 0
        return train, _load_split(builder, "validation", config.text_column) if held_out else None


def _load_split(builder: Any, split: str, column: str) -> Corpus:
    try:
        data = builder.as_dataset(split=split)
    except ValueError as error:
        raise UserError(f"dataset.split = {split!r}: {error}") from error
    columns = [name for name, feature in data.features.items() if getattr(feature, "dtype", "").endswith("string")]
    if column not in columns:
        raise UserError(
            f"dataset.text_column = {column!r}: this is not a text column; use one of {', '.join(columns) or 'none'}"
        )
    rows = (row[column] for row in data.select_columns(column))
    return Corpus([Path(file["filename"]) for file in data.cache_files], f"{split}/{column}", filter(None, rows))
