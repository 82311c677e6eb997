"""Export: writes the weights of a checkpoint for other programs: transformers, PEFT, safetensors or torch.

An export is written beside its final name, opened again with the library that others will use, compared with the
checkpoint tensor by tensor, and only then renamed. `export_folders.py` writes models and adapters as folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from shoal.checkpoint.export_folders import MERGE_INTO, write_hf, write_peft
from shoal.checkpoint.folders import discard, flush, swap_in
from shoal.checkpoint.frozen_base import FrozenBaseError, base_files
from shoal.checkpoint.init_from import added_tokens
from shoal.checkpoint.inspect import as_dict, open_step_folder
from shoal.checkpoint.manifest import dtype_name
from shoal.checkpoint.pieces import dtype_in_files, write_safetensors
from shoal.checkpoint.store import Checkpoint
from shoal.checkpoint.trained_model import Source, compare, recipe_sections
from shoal.errors import UserError, as_user_error, one_line
from shoal.lora.peft_folder import about_base
from shoal.tensors import DTYPES

_EXPORTED_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja", ".md"}


def export(
    step_dir: Path,
    out: Path,
    to: str,
    dtype: str | None = None,
    force: bool = False,
    base: Path | None = None,
    adapter_only: bool = False,
    average: str | None = None,
    merge_into: str | None = None,
) -> dict[str, Any]:
    """Writes the weights of a checkpoint to `out`, and compares what was written with the checkpoint.

    `dtype` converts the parameters; without it they stay as stored. The frozen base is read from the files in the
    manifest, or from `base`; `adapter_only` leaves it out. `average` names a callback, such as `ema`, whose average
    of the weights is exported in their place. `merge_into` says which weights `hf` adds adapters to: the `original`
    ones, or what a quantised base computes with (`dequantised`). Returns what `shoal checkpoint export --json` prints.
    """
    for option, value, choices in (
        ("--to", to, _WRITERS),
        ("--dtype", dtype or "fp32", DTYPES),
        ("--merge-into", merge_into or "original", MERGE_INTO),
    ):
        if value not in choices:
            raise UserError(f"{option} {value} is not one of {', '.join(choices)}")
    checkpoint = open_step_folder(step_dir, base)
    _check_options(checkpoint, to, base, adapter_only)
    merges = to == "hf" and bool(recipe_sections(checkpoint).get("lora"))
    if merge_into and not merges:
        raise UserError(f"--merge-into {merge_into} is for --to hf of a run with adapters (lora:); leave it out")
    _check_target(out, to, force)
    if out.resolve().is_relative_to(step_dir.resolve()):
        raise UserError(f"{out} is inside the checkpoint, which must not change; choose another place")
    files = ", ".join(base_files(checkpoint.base))
    beside = out.absolute().with_name(f".{out.absolute().name}.part")
    try:
        with as_user_error(f"{out} cannot be written", OSError, SafetensorError):
            beside.parent.mkdir(parents=True, exist_ok=True)
            discard(beside)
            source = Source(checkpoint, dtype, adapter_only, average, (merge_into or "original") if merges else None)
            notes = _WRITERS[to](source, beside)
            nbytes = _flush_with_default_mode(beside)
            swap_in(beside, out.absolute())
    except FrozenBaseError as error:
        raise UserError(
            f"{checkpoint.folder} refers to frozen weights, but {error}; give --base PATH if they were moved, or "
            "--adapter-only with --to safetensors or torch to export only the stored tensors"
        ) from None
    finally:
        discard(beside)
    if average:
        notes = (f"{len(source.averaged)} tensors are the average of {average}", *notes)
    if adapter_only or (to == "peft" and checkpoint.base):
        notes = (f"only the adapter, for frozen weights in {files}", *notes)
    elif checkpoint.base:
        number = len({(piece.path, piece.key) for tensor in checkpoint.base.values() for piece in tensor.pieces})
        notes = (f"{number} frozen tensors are from {files}", *notes)
    return {
        "path": str(out),
        "kind": to,
        "tensors": source.num_written,
        "nbytes": nbytes,
        "dtype": dtype or "as stored",
        "notes": notes,
    }


def _check_options(checkpoint: Checkpoint, to: str, base: Path | None, adapter_only: bool) -> None:
    """Raises UserError for options that contradict each other or the checkpoint."""
    if adapter_only and not checkpoint.base:
        raise UserError(
            f"--adapter-only: {checkpoint.folder} stores all its weights and has no frozen base; leave it out"
        )
    if adapter_only and to in ("hf", "peft"):
        writes = "whole models" if to == "hf" else "the adapter alone in any case"
        raise UserError(f"--to {to} writes {writes}; give --adapter-only with --to safetensors or --to torch")
    if adapter_only and base:
        raise UserError("--adapter-only leaves the frozen base out, and --base says where it is; give one of them")


def _write_safetensors(source: Source, path: Path) -> tuple[str, ...]:
    """Writes one safetensors file, and returns notes for the user."""
    for name, dtype in source.dtypes.items():
        if dtype_in_files(dtype) is None:
            raise UserError(f"--to safetensors cannot hold {name}, which is {dtype_name(dtype)}; use --to torch")
    on_meta = {n: torch.empty(t.shape, dtype=source.dtypes[n], device="meta") for n, t in source.tensors.items()}
    base = source.checkpoint.base
    left_out = {name: tensor.source.sha256 for name, tensor in base.items() if name not in source.tensors}
    added = added_tokens(as_dict(source.checkpoint.manifest.get("config"))) or ()
    metadata = about_base(left_out, added) if left_out else None  # so that `init_from` recognises the base
    write_safetensors(path, on_meta, source.read, metadata)  # one tensor is in memory at a time
    compare(source, load_file(path))
    aliases = ", ".join(f"{alias} is {name}" for alias, name in source.tied.items())
    return (f"tied tensors are stored once: {aliases}",) if aliases else ()


def _write_torch(source: Source, path: Path) -> tuple[str, ...]:
    """Writes a state dict with torch.save, and returns notes for the user."""
    weights = {name: source.read(name) for name in source.tensors}
    # A stored tensor may be a view of its whole mapped file, and torch.save would write all of the view's memory.
    weights = {name: w.clone() if w.untyped_storage().nbytes() != w.nbytes else w for name, w in weights.items()}
    weights |= {alias: weights[name] for alias, name in source.tied.items()}
    try:
        torch.save(weights, path)
    except RuntimeError as error:  # what torch raises for a full disk
        raise OSError(one_line(error)) from None
    del weights
    compare(source, torch.load(path, map_location="cpu", weights_only=True, mmap=True), source.tied)
    return ()


def _check_target(out: Path, to: str, force: bool) -> None:
    """Raises UserError if `out` exists, unless `force` is set and it is an earlier export."""
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise UserError(f"{out} exists; choose another name, or give --force to replace it")
    # A folder that was given by mistake must not be lost, so only what looks like an earlier export is replaced.
    is_export_folder = (
        out.is_dir()
        and any((out / name).is_file() for name in ("config.json", "adapter_config.json"))
        and all(entry.is_file() and entry.suffix in _EXPORTED_SUFFIXES for entry in out.iterdir())
    )
    if out.is_symlink() or not (is_export_folder if to in ("hf", "peft") else out.is_file()):
        raise UserError(f"{out} is not an earlier export, so --force does not replace it; choose another name")


def _flush_with_default_mode(path: Path) -> int:
    """Flushes the exported files, gives them the mode of newly created files, and returns their size in bytes.

    Some libraries write files that only their owner may read.
    """
    mask = os.umask(0)
    os.umask(mask)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        file.chmod(0o666 & ~mask)
        flush(file)
    return sum(file.stat().st_size for file in files)


_WRITERS: dict[str, Callable[[Source, Path], tuple[str, ...]]] = {
    "hf": write_hf,
    "peft": write_peft,
    "safetensors": _write_safetensors,
    "torch": _write_torch,
}
