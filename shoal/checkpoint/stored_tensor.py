"""Tensors on disk, read in parts: a rank opens the pieces it needs and no others.

A file is mapped into memory, so that checking a piece and copying out of it later costs cache, not memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.checkpoint.regions import Box, whole_box, why_not_whole

LARGEST = 1 << 62  # elements that torch can still count, with room for the bytes of each


class DamagedCheckpoint(Exception):
    """The folder is not what its manifest says: cut short, altered, or never finished."""


@dataclass(frozen=True)
class Piece:
    file: str
    box: Box
    sha256: str


class Pieces:
    """The files of one checkpoint, opened when first needed. Each piece is compared with its digest once."""

    def __init__(self, folder: Path, files: dict[str, Any]):
        self.folder, self._files = folder, files
        self._open: dict[str, Any] = {}
        self._checked: set[tuple[str, str]] = set()

    def read(self, name: str, dtype: torch.dtype, piece: Piece) -> Tensor:
        path = self.folder / piece.file
        try:
            file = self._open.get(piece.file) or self._open_file(piece.file)
            key = name.partition("/")[2]
            if tuple(file.get_slice(key).get_shape()) != piece.box.shape:
                raise DamagedCheckpoint(f"{path}: {name} has another shape than in the manifest")
            tensor = file.get_tensor(key)
            if tensor.dtype != dtype:
                raise DamagedCheckpoint(f"{path}: {name} is {tensor.dtype}, but {dtype} in the manifest")
            if (name, piece.file) not in self._checked:
                if tensor_digest(tensor) != piece.sha256:
                    raise DamagedCheckpoint(f"{path}: {name} does not match its digest")
                self._checked.add((name, piece.file))
            return tensor
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise DamagedCheckpoint(f"{path}: {error}") from None

    def _open_file(self, file: str) -> Any:
        if header_digest(self.folder / file) != self._files[file]["header"]:
            raise DamagedCheckpoint(f"{self.folder / file}: its header was altered")
        self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint. What it is is known; what it holds is read when asked for, any part of it."""

    name: str
    """With its room: model/…, optimizer/<slot>/…, strategy/…"""
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = field(repr=False)
    source: Pieces = field(repr=False, compare=False)

    def read(self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The part that begins at `offset` and is `shape` large, or all of it; on the CPU.

        It may be a view of the file: copy it to keep it. Raises DamagedCheckpoint.
        """
        wanted = self._box(offset, shape)
        needed = self._needed(wanted)
        if len(needed) == 1 and needed[0][1] == wanted:
            (piece, part), *_ = needed
            return self.source.read(self.name, self.dtype, piece)[part.within(piece.box)]
        result = torch.empty(wanted.shape, dtype=self.dtype)
        for piece, part in needed:
            result[part.within(wanted)] = self.source.read(self.name, self.dtype, piece)[part.within(piece.box)]
        return result

    def check(self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> None:
        """Compares the pieces that `read` would open with their digests."""
        for piece, _ in self._needed(self._box(offset, shape)):
            self.source.read(self.name, self.dtype, piece)

    def _box(self, offset: Sequence[int] | None, shape: Sequence[int] | None) -> Box:
        whole = whole_box(self.shape)
        if offset is None or shape is None:
            return whole
        box = Box(tuple(offset), tuple(shape))
        if len(box.shape) != len(self.shape) or (box.numel and box.overlap(whole) != box):
            raise ValueError(f"{self.name} is {[*self.shape]} and has no part {[*shape]} at {[*offset]}")
        return box

    def _needed(self, wanted: Box) -> list[tuple[Piece, Box]]:
        if wanted == whole_box(self.shape):  # an empty tensor too: its piece holds nothing, but is checked
            return [(piece, piece.box) for piece in self.pieces]
        overlaps = ((piece, wanted.overlap(piece.box)) for piece in self.pieces)
        return [(piece, part) for piece, part in overlaps if part]


def parse_tensors(tensors: dict[str, Any], source: Pieces, sizes: dict[str, int]) -> dict[str, Stored]:
    """The manifest's tensors; ValueError if they cannot be what it says.

    A manifest is not to be trusted: what it claims has to fit into files of these `sizes` before anything is
    allocated, and the pieces have to make up the whole.
    """
    room = dict(sizes)
    stored: dict[str, Stored] = {}
    for name, about in tensors.items():
        dtype = parse_dtype(name, about["dtype"])
        shape = parse_lengths(name, about["shape"])
        pieces = tuple(
            Piece(piece["file"], Box(*(parse_lengths(name, piece[k]) for k in ("offset", "shape"))), piece["sha256"])
            for piece in about["pieces"]
        )
        if problem := why_not_whole(shape, [piece.box for piece in pieces]):
            raise ValueError(f"{name}: {problem}")
        if len({piece.file for piece in pieces}) != len(pieces):
            raise ValueError(f"{name} has two pieces in one file")
        for piece in pieces:
            room[piece.file] -= piece.box.numel * dtype.itemsize
            if room[piece.file] < 0:
                raise ValueError(f"{piece.file} is too small for {name}")
        stored[name] = Stored(name, dtype, shape, pieces, source)
    return stored


def parse_dtype(name: str, text: Any) -> torch.dtype:
    dtype = getattr(torch, str(text), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the unknown dtype {text!r}")
    return dtype


def parse_lengths(name: str, numbers: Any) -> tuple[int, ...]:
    whole = len(numbers) <= 64 and all(type(number) is int and number >= 0 for number in numbers)  # torch's most
    if not whole or prod(number or 1 for number in numbers) > LARGEST:
        raise ValueError(f"{name} has the impossible shape or offset {numbers!r:.100}")
    return tuple(numbers)


def header_digest(path: Path) -> str:
    """safetensors: eight bytes of length, then that much JSON."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
    return hashlib.sha256(length + header).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().view(-1)
    raw: Callable[[], Any] = flat.view(torch.uint8).numpy if flat.numel() else lambda: b""
    return hashlib.sha256(memoryview(raw())).hexdigest()
