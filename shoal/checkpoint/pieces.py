"""Pieces of tensors in safetensors files: written with digests in one pass over memory, mapped into memory to be read.

The library's own writer copies every tensor and holds Python's lock while it writes, so that nothing else of a process
runs; this one does neither, and a checkpoint can be written while training goes on. Reading is the library's.
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
"""What opening a damaged file, or reading a tensor from it, raises."""

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
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_CHUNK_BYTES = 1 << 24


class DamagedCheckpoint(UserError):
    """The folder is not what its manifest says: cut short, altered, or never finished."""


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Writes tensors from any device, one after another. The file is on the disk when this returns.

    With `read`, `tensors` may be on meta: each is then read when it is written. Returns what the manifest says of the
    file (its bytes and the digest of its header), and the digest of each tensor.
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
    nbytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return {"bytes": nbytes, "header": hashlib.sha256(header).hexdigest()}, digests


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns eight bytes of length and that much JSON, filled up with spaces."""
    entries: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: FileIO, data: bytes | memoryview) -> str:
    """Writes all of `data` and returns its digest. The system may write less at a time than it is given."""
    digest, left = hashlib.sha256(), memoryview(data)
    while len(left):
        written = file.write(left[:_CHUNK_BYTES])
        digest.update(left[:written])
        left = left[written:]
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def tensor_digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
    return hashlib.sha256(length + header).hexdigest()


@dataclass(frozen=True)
class Piece:
    """A region of a tensor that is stored in one file."""

    path: Path
    key: str
    """The name in the file."""
    region: Region
    dtype: torch.dtype
    """In the file."""
    sha256: str


class MappedFiles:
    """The files of one checkpoint, mapped into memory when first needed. Each piece is compared with its digest once.

    Reading a mapped piece twice, to check it and to copy it, costs page cache and no memory of the process.
    """

    def __init__(self, headers: Mapping[str, str]):
        """`headers` are the digests of the files' headers, by their names."""
        self.headers = headers
        self._open: dict[Path, Any] = {}
        self._checked: set[Piece] = set()

    def check(self, path: Path) -> None:
        """Raises ValueError if a file is not what it should be, before it is opened."""
        if header_digest(path) != self.headers[path.name]:
            raise ValueError("its header was altered")

    def damage(self, path: Path, error: Exception) -> Exception:
        """Returns the error to raise for a file that cannot be read."""
        return DamagedCheckpoint(f"{path}: {error}")

    def tensor(self, path: Path, key: str) -> Tensor:
        """Returns a tensor as it is in a file, compared with nothing."""
        try:
            if path not in self._open:
                self.check(path)
                self._open[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(key)
        except READ_ERRORS as error:
            raise self.damage(path, error) from None
        return tensor

    def read(self, piece: Piece) -> Tensor:
        tensor = self.tensor(piece.path, piece.key)
        if (tuple(tensor.shape), tensor.dtype) != (piece.region.shape, piece.dtype):
            raise self.damage(piece.path, ValueError(f"{piece.key} has another shape or dtype than in the manifest"))
        if piece not in self._checked and tensor_digest(tensor) != piece.sha256:
            raise self.damage(piece.path, ValueError(f"{piece.key} does not match its digest"))
        self._checked.add(piece)
        return tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files. Its values are read when asked for, any region of it."""

    name: str
    """With its section: model/…, optimizer/<slot>/…, strategy/…"""
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = field(repr=False)
    files: MappedFiles = field(repr=False, compare=False)

    def read(self, region: Region | None = None) -> Tensor:
        """Returns a region of the tensor, or all of it, on the CPU.

        It may be a view of the file: copy it to keep it. Raises DamagedCheckpoint, or BaseProblem for a frozen base.
        """
        region = region or whole_region(self.shape)
        needed = self._needed(region)
        if len(needed) == 1 and needed[0][1] == region:
            piece, overlap = needed[0]
            return self.files.read(piece)[overlap.within(piece.region)].to(self.dtype)
        result = torch.empty(region.shape, dtype=self.dtype)
        for piece, overlap in needed:
            result[overlap.within(region)] = self.files.read(piece)[overlap.within(piece.region)]
        return result

    def check(self, region: Region | None = None) -> None:
        """Compares the pieces that `read` would open with their digests. Raises what `read` does."""
        for piece, _ in self._needed(region or whole_region(self.shape)):
            self.files.read(piece)

    def _needed(self, region: Region) -> list[tuple[Piece, Region]]:
        """Returns the pieces that overlap a region, each with the region of its overlap."""
        whole = whole_region(self.shape)
        if region == whole:  # an empty tensor too: its piece holds nothing, but is checked
            return [(piece, piece.region) for piece in self.pieces]
        if len(region.shape) != len(self.shape) or (region.numel and region.overlap(whole) != region):
            raise ValueError(f"{self.name} {[*self.shape]} has no region {[*region.shape]} at {[*region.offset]}")
        overlaps = ((piece, region.overlap(piece.region)) for piece in self.pieces)
        return [(piece, overlap) for piece, overlap in overlaps if overlap]
