"""Writes safetensors files and their digests in one pass over memory.

The library's own writer copies every tensor and holds Python's lock while it writes, so that nothing else of a process
runs; this one does neither, and a checkpoint can be written while training goes on. Reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {
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


@dataclass(frozen=True)
class Written:
    """What a file holds, in digests."""

    nbytes: int
    header: str
    tensors: dict[str, str]


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """One tensor after another, from any device. The file is on the disk when this returns."""
    header = _header(tensors)
    try:
        with path.open("wb", buffering=0) as file:
            _write(file.fileno(), header)
            digests = {name: _write_tensor(file.fileno(), tensors[name]) for name in _in_order(tensors)}
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    nbytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return Written(nbytes, hashlib.sha256(header).hexdigest(), digests)


def _write_tensor(descriptor: int, tensor: Tensor) -> str:
    digest, raw = hashlib.sha256(), _bytes(tensor)
    for start in range(0, len(raw), _CHUNK_BYTES):
        chunk = raw[start : start + _CHUNK_BYTES]
        digest.update(chunk)
        _write(descriptor, chunk)
    return digest.hexdigest()


def _in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The widest types first, so that every tensor lies where its type may."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Eight bytes of length, then that much JSON, filled up with spaces."""
    about: dict[str, object] = {}
    end = 0
    for name in _in_order(tensors):
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        about[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(raw)


def _write(descriptor: int, data: bytes | memoryview) -> None:
    """All of it: a write may be short."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]
