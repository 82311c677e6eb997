"""Pieces of tensors in safetensors files: written and hashed in one pass, and mapped into memory for reading.

A piece is a region of a tensor that is stored in one file. The writer of the safetensors library copies every tensor
and holds Python's global lock while it writes, which would stop training; this writer does neither. Files are read by
the library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from os import fsync
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.checkpoint.regions import Region, whole_region
from shoal.errors import UserError

READ_ERRORS = (OSError, SafetensorError, KeyError, ValueError, RuntimeError)
"""The errors that opening a damaged file, or reading a tensor from it, may raise."""

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
STORED_DTYPES = frozenset(_DTYPE_NAMES)
_CHUNK_BYTES = 1 << 24


class DamagedCheckpoint(UserError):
    """A checkpoint's files do not match its manifest: one of them is missing, shorter or altered."""


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Writes tensors from any device one after another, and flushes the file to the disk.

    With `read`, `tensors` may be on the meta device: their values are then read one at a time. Returns the file's
    entry for the manifest (its size and the digest of its header), and the digest of each tensor.
    """
    # The widest dtypes come first, so that every tensor is aligned in the file.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header, read = _header(tensors), read or tensors.__getitem__
    try:
        with FileIO(path, "w") as file:
            _write(file, header)
            digests = {name: _write(file, tensor_bytes(read(name))) for name in tensors}
            fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return {"bytes": num_bytes, "header": hashlib.sha256(header).hexdigest()}, digests


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns the header of a safetensors file: eight bytes of length, then JSON, padded with spaces."""
    entries: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: FileIO, data: bytes | memoryview) -> str:
    """Writes all of `data` and returns its digest. A single call to the system may write only some of the bytes."""
    digest, left = hashlib.sha256(), memoryview(data)
    while len(left):
        written = file.write(left[:_CHUNK_BYTES])
        digest.update(left[:written])
        left = left[written:]
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor; without a copy if it is contiguous and on the CPU."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def tensor_digest(tensor: Tensor) -> str:
    """Returns the sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def header_digest(path: Path) -> str:
    """Returns the sha256 of the header of a safetensors file."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
    return hashlib.sha256(length + header).hexdigest()


@dataclass(frozen=True)
class Piece:
    """A region of a tensor that is stored in one file."""

    path: Path
    key: str
    """The tensor's name in the file."""
    region: Region
    dtype: torch.dtype
    """The dtype in the file."""
    sha256: str


class MappedFiles:
    """The files of one checkpoint, mapped into memory when first used. Each piece is compared with its digest once.

    Because files are mapped, reading a piece twice (to check it, then to copy it) takes page cache and no memory of
    the process.
    """

    def __init__(self, headers: Mapping[str, str]):
        """`headers` maps the name of each file to the digest of its header."""
        self.headers = headers
        self._open: dict[Path, Any] = {}
        self._checked: set[Piece] = set()

    def check(self, path: Path) -> None:
        """Raises ValueError if the header of a file was altered. Called once for each file, before it is opened."""
        if header_digest(path) != self.headers[path.name]:
            raise ValueError("its header was altered")

    def damage(self, path: Path, error: Exception) -> Exception:
        """Returns the exception to raise for a file that cannot be read."""
        return DamagedCheckpoint(f"{path}: {error}")

    def tensor(self, path: Path, key: str) -> Tensor:
        """Returns a tensor from a file without comparing it with a digest."""
        try:
            if path not in self._open:
                self.check(path)
                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_tensor(key)
        except READ_ERRORS as error:
            raise self.damage(path, error) from None

    def read(self, piece: Piece) -> Tensor:
        """Returns a piece, after comparing its shape, dtype and digest with the manifest."""
        tensor = self.tensor(piece.path, piece.key)
        if (tuple(tensor.shape), tensor.dtype) != (piece.region.shape, piece.dtype):
            raise self.damage(piece.path, ValueError(f"{piece.key} has another shape or dtype than in the manifest"))
        if piece not in self._checked and tensor_digest(tensor) != piece.sha256:
            raise self.damage(piece.path, ValueError(f"{piece.key} does not match its digest"))
        self._checked.add(piece)
        return tensor


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor that is stored in files. `read` loads any region of it."""

    name: str
    """The name with its section: model/<name>, optimizer/<slot>/<name> or strategy/<name>."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = field(repr=False)
    files: MappedFiles = field(repr=False, compare=False)

    def read(self, region: Region | None = None) -> Tensor:
        """Returns a region of the tensor, or all of it, on the CPU.

        The result may be a view of the mapped file: copy it to keep it. Raises DamagedCheckpoint, or FrozenBaseError
        for a tensor of a frozen base.
        """
        region = region or whole_region(self.shape)
        needed = self._needed(region)
        if len(needed) == 1 and needed[0][1] == region:
            piece, overlap = needed[0]
            return self.files.read(piece)[overlap.slices_in(piece.region)].to(self.dtype)
        result = torch.empty(region.shape, dtype=self.dtype)
        for piece, overlap in needed:
            result[overlap.slices_in(region)] = self.files.read(piece)[overlap.slices_in(piece.region)]
        return result

    def check(self, region: Region | None = None) -> None:
        """Compares the pieces that `read` would open with their digests, and raises what `read` would raise."""
        for piece, _ in self._needed(region or whole_region(self.shape)):
            self.files.read(piece)

    def _needed(self, region: Region) -> list[tuple[Piece, Region]]:
        """Returns the pieces that overlap a region, each with the region that both have in common."""
        whole = whole_region(self.shape)
        if region == whole:  # this includes empty tensors, whose piece has no bytes but is checked all the same
            return [(piece, piece.region) for piece in self.pieces]
        if len(region.shape) != len(self.shape) or (region.numel and region.intersect(whole) != region):
            raise ValueError(f"{self.name} {[*self.shape]} has no region {[*region.shape]} at {[*region.offset]}")
        overlaps = ((piece, region.intersect(piece.region)) for piece in self.pieces)
        return [(piece, overlap) for piece, overlap in overlaps if overlap]
