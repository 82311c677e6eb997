"""The manifest of a checkpoint: which tensors are stored in which files, with a digest of each and of the manifest.

A manifest is not trusted, because anyone who can write a file can also compute a digest. Before any memory is allocated
for a tensor, its claimed size has to fit into the files that exist. The files of a checkpoint are regular files in its
folder, and not links.
"""

from __future__ import annotations

import hashlib
import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.checkpoint.pieces import MappedFiles, Piece, StoredTensor, is_storable
from shoal.checkpoint.regions import Region, coverage_problem
from shoal.errors import UserError
from shoal.tensors import tensors_with_names
from shoal.weights.regular_files import check_regular, read_json_text

FORMAT = 2
"""The format of checkpoints that refer to a frozen base: a shoal that knows only format 1 would load them without it.
All other checkpoints have format 1."""
DERIVED_FORMAT = 3
"""The format of those whose frozen base is quantised, or has rows for new tokens."""
MANIFEST = "manifest.json"
SECTIONS = ("model", "optimizer", "strategy", "callbacks")
"""The first part of a stored tensor's name; each section has files of its own."""
_MAX_NUMEL = 1 << 62  # a bound below which torch can count elements and their bytes
_MAX_DIMENSIONS = 64


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest of a checkpoint and adds a digest of the manifest itself."""
    (folder / MANIFEST).write_text(json.dumps(manifest | {"digest": manifest_digest(manifest)}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint. Raises ValueError if it is damaged, UserError if its format is unknown."""
    text = read_json_text(folder / MANIFEST).decode()
    manifest = json.loads(text)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ValueError(f"{MANIFEST} is not a manifest")
    # The digest comes before the format, because a flipped bit in the format is damage too. The text is compared as
    # well, because some flipped bits change the text and not its meaning: 1e-5 and 1E-5.
    if text != json.dumps(manifest, indent=1) or manifest.pop("digest", None) != manifest_digest(manifest):
        raise ValueError(f"{MANIFEST} does not match its own digest")
    if manifest["format"] not in (1, FORMAT, DERIVED_FORMAT):
        raise UserError(
            f"{folder} has checkpoint format {manifest['format']}, but shoal {shoal.__version__} reads formats 1 to "
            f"{DERIVED_FORMAT}; use the version of shoal that wrote it"
        )
    for file, facts in manifest["files"].items():
        if Path(file).name != file:
            raise ValueError(f"{MANIFEST} points outside its folder: {file!r}")
        if check_regular(folder / file).st_size != facts["bytes"]:
            raise ValueError(f"{file} is not {facts['bytes']} bytes long")
    return manifest


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Returns the digest of a manifest without its `digest`."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def tied_and_buffers(model: nn.Module) -> dict[str, Any]:
    """Returns the manifest's entries `tied` (further name → first name of a tied tensor) and `buffers` (names)."""
    named = [*tensors_with_names(model)]
    return {
        "tied": {alias: first for _, (first, *aliases) in named for alias in aliases},
        "buffers": [names[0] for tensor, names in named if not isinstance(tensor, nn.Parameter)],
    }


def parse_tensors(folder: Path, manifest: dict[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by section and name. Raises ValueError for impossible or unsafe claims."""
    files = MappedFiles({file: facts.get("header") for file, facts in manifest["files"].items()})
    bytes_left = {file: facts["bytes"] for file, facts in manifest["files"].items()}
    tensors: dict[str, StoredTensor] = {}
    for name, facts in manifest["tensors"].items():
        if name.partition("/")[0] not in SECTIONS:
            raise ValueError(f"{MANIFEST} has a tensor of an unknown section: {name!r}")
        dtype, shape = parse_dtype(name, facts["dtype"]), parse_lengths(name, facts["shape"])
        key, pieces = name.partition("/")[2], list[Piece]()
        for piece in facts["pieces"]:
            region = Region(parse_lengths(name, piece["offset"]), parse_lengths(name, piece["shape"]))
            bytes_left[piece["file"]] -= region.numel * dtype.itemsize
            if bytes_left[piece["file"]] < 0:
                raise ValueError(f"{piece['file']} is too small for {name}")
            pieces.append(Piece(folder / piece["file"], key, region, dtype, str(piece["sha256"])))
        if problem := coverage_problem(shape, [piece.region for piece in pieces]):
            raise ValueError(f"{name}: {problem}")
        if len({piece.path for piece in pieces}) != len(pieces):
            raise ValueError(f"{name} has two pieces in one file")
        tensors[name] = StoredTensor(name, dtype, shape, tuple(pieces), files)
    return tensors


def parse_dtype(name: str, text: Any) -> torch.dtype:
    """Returns the dtype that a manifest names for a tensor; the inverse of `dtype_name`."""
    dtype = getattr(torch, str(text), None)
    if not isinstance(dtype, torch.dtype) or not is_storable(dtype):
        raise ValueError(f"{name} has the unknown dtype {text!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in a manifest, such as float32."""
    return str(dtype).removeprefix("torch.")


def parse_lengths(name: str, numbers: Any) -> tuple[int, ...]:
    """Returns a shape or an offset from a manifest."""
    valid = len(numbers) <= _MAX_DIMENSIONS and all(type(number) is int and number >= 0 for number in numbers)
    if not valid or prod(number or 1 for number in numbers) > _MAX_NUMEL:
        raise ValueError(f"{name} has the impossible shape or offset {numbers!r:.100}")
    return tuple(numbers)
