"""Pieces of tensors in safetensors files: written and hashed in one pass, and mapped into memory for reading.

A piece is a region of a tensor that is stored in one file. The writer of the safetensors library copies every tensor
and holds Python's global lock while it writes, which would stop training; this writer does neither. Files are read by
the library.

A dtype that the installed version of the library does not know, such as complex128, is stored as bytes: as uint8 with
one more dimension, which has the bytes of each element. The manifest names the dtype.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from io import FileIO
from os import fsync
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from shoal.checkpoint.regions import Region, whole_region
from shoal.errors import UserError, one_line
from shoal.weights.regular_files import MAX_HEADER_BYTES, read_regular

READ_ERRORS = (OSError, SafetensorError, KeyError, ValueError, RuntimeError)
"""The errors that opening a damaged file, or reading a tensor from it, may raise."""

_CHUNK_BYTES = 1 << 24


class DamagedCheckpoint(UserError):
    """A checkpoint's files do not match its manifest: one of them is missing, shorter or altered."""


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Writes tensors from any device one after another, and flushes the file to the disk.

    With `read`, `tensors` may be on the meta device: their values are then read one at a time. `metadata` goes into the
    header. Returns the file's entry for the manifest (its size and the digest of its header), and the digest of each
    tensor.
    """
    # The widest dtypes come first, so that every tensor is aligned in the file.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header, read = _header(tensors, metadata), read or tensors.__getitem__
    try:
        with FileIO(path, "w") as file:
            _write(file, header)
            digests = {name: _write(file, tensor_bytes(read(name))) for name in tensors}
            fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return {"bytes": num_bytes, "header": hashlib.sha256(header).hexdigest()}, digests


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Returns the header of a safetensors file: eight bytes of length, then JSON, padded with spaces."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        file_dtype, shape = dtype_in_files(tensor.dtype), [*tensor.shape]
        if file_dtype is None:
            file_dtype, shape = "U8", [*shape, tensor.dtype.itemsize]
        entries[name] = {"dtype": file_dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@cache
def dtype_in_files(dtype: torch.dtype) -> str | None:
    """Returns the name that the installed safetensors has for a dtype, such as F32; None if it cannot hold it.

    The library is asked by saving two elements and loading them again, because its table of dtypes is private.
    """
    try:
        data = save({"x": torch.empty(2, dtype=dtype)})
        entry = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]
        # Dtypes of less than a byte have other shapes in a file than in torch.
        is_plain = entry["shape"] == [2] and entry["data_offsets"] == [0, 2 * dtype.itemsize]
        return str(entry["dtype"]) if is_plain and load(data)["x"].dtype == dtype else None
    except Exception:  # each version raises something else
        return None


def why_not_storable(tensor: Tensor) -> str | None:
    """Returns why a checkpoint cannot hold a tensor, or None if it can."""
    if tensor.layout != torch.strided:
        return f"is stored in the layout {str(tensor.layout).removeprefix('torch.')}; only dense tensors can be saved"
    if not is_storable(tensor.dtype):
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"has the dtype {dtype}, which cannot be saved; keep it as a tensor of integers"
    return None


@cache
def is_storable(dtype: torch.dtype) -> bool:
    """Returns False for dtypes that are not just bytes (quantized ones), and for those that torch cannot copy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about quantized dtypes, which new versions of torch deprecate
            element = torch.empty(1, dtype=dtype)
        return not element.is_quantized and element.copy_(torch.empty(1, dtype=dtype)).dtype == dtype
    except RuntimeError:
        return False


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
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _from_bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor that was stored as bytes, or the tensor itself if it was not; the inverse of `tensor_bytes`."""
    if tensor.dtype != torch.uint8 or not tensor.ndim or tensor.shape[-1] != dtype.itemsize:
        return tensor
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() % dtype.itemsize or flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # a mapped file is aligned to 8 bytes, and torch crashes if complex128 is not to 16
    return flat.view(dtype).view(tensor.shape[:-1])


def tensor_digest(tensor: Tensor) -> str:
    """Returns the sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def header_digest(path: Path) -> str:
    """Returns the sha256 of the header of a safetensors file. Raises ValueError if it is no regular file."""
    length = int.from_bytes(read_regular(path, 8), "little")
    return hashlib.sha256(read_regular(path, 8 + min(length, MAX_HEADER_BYTES))).hexdigest()


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
        return DamagedCheckpoint(f"{path}: {one_line(error)}")

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
        if piece.dtype != tensor.dtype:
            tensor = _from_bytes(tensor, piece.dtype)
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
