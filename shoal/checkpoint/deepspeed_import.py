"""Checkpoints that DeepSpeed wrote, ZeRO 1 to 3, made into one of ours.

They are pickles: opening one runs whatever it says. So this is done by a command that names the folder as trusted,
and by nothing else. What is read:

    TAG/*model_states.pt   names and shapes, under stage 3 in the order of the parts; frozen parameters; buffers
    TAG/*optim_states.pt   of every rank: its part of the fp32 weights and of what the optimizer keeps
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.store import write_checkpoint
from shoal.errors import UserError, one_line
from shoal.parallel.zero.partition import load_deepspeed
from shoal.types import TrainState

Shapes = dict[str, torch.Size]
"""Of the trained parameters, in the order in which ZeRO laid them out."""


def import_deepspeed(trusted: Path, out: Path) -> dict[str, Any]:
    """Makes the checkpoint in `trusted`, which is opened as a pickle, into a neutral one.

    Returns what `shoal checkpoint import --json` prints.
    """
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} exists; name a new folder")
    folder = _find(trusted)
    load_deepspeed(torch.device("cpu"))  # its pickles name its classes
    models, files = _load(folder, "model_states"), _load(folder, "optim_states")
    try:
        step, parts = int(models[0].get("global_steps", 0)), [file["optimizer_state_dict"] for file in files]
        stage = int(parts[0].get("zero_stage", 1))  # with bf16 weights and fp32 sums, stage 1 does not say
        state, names = _put_together(models, parts, stage)
    except Exception as error:  # there is no format, only what some version happened to pickle
        what = one_line(error) if isinstance(error, _Unlike) else f"{type(error).__name__} {one_line(error)}"
        raise UserError(f"{folder} is not laid out as shoal knows: {what}") from None
    layout = {"strategy": "deepspeed", "world_size": len(files), "data_size": len(files)}
    write_checkpoint(out, state, {"step": step}, {"layout": layout, **names, "imported_from": str(folder)})
    slots = sorted({slot for slots in state.optimizer.values() for slot in slots})
    facts = {"path": str(out), "stage": stage, "ranks": len(files), "step": step}
    return {**facts, "tensors": len(state.model), "slots": slots}


class _Unlike(Exception):
    """Says what is not as it should be."""


def _put_together(models: list[Any], parts: list[Any], stage: int) -> tuple[TrainState, dict[str, Any]]:
    """The whole state, and what the manifest says of its names."""
    first, ranks, counts = models[0], len(parts), parts[0]["partition_count"]
    if stage not in (1, 2, 3) or (max(counts) if isinstance(counts, list) else counts) != ranks:
        raise _Unlike(f"it has the parts of {ranks} ranks, but was written by {counts} at ZeRO stage {stage}")
    shapes: Shapes = {name: shape for group in first["param_shapes"] for name, shape in group.items()}
    flats = [part["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for part in parts]
    states = [part["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for part in parts]
    cut = partial(_cut_stage_3 if stage == 3 else _cut_below_3, shapes=shapes, parts=parts)
    buffers = [*first["buffer_names"]]
    model = {name: first["module"][name] for name in buffers if name in first["module"]}
    model |= dict(_frozen(models, stage)) | dict(cut(flats))
    model = {name: tensor.detach().contiguous() for name, tensor in model.items()}
    optimizer: dict[str, dict[str, Tensor]] = {}
    # A list is what zero_optimization.elastic_checkpoint writes.
    kept = [s if isinstance(s, list) else [s["state"].get(group, {}) for group in range(len(flats[0]))] for s in states]
    for slot in sorted({slot for group in kept[0] for slot, value in group.items() if value is not None}):
        for name, value in _cut_slot(slot, [[group.get(slot) for group in rank] for rank in kept], cut, shapes):
            optimizer.setdefault(name, {})[slot] = value
    tied = {alias: name for alias, name in dict(first.get("shared_params") or {}).items() if name in model}
    return TrainState(model, optimizer), {"tied": tied, "buffers": buffers}


def _find(trusted: Path) -> Path:
    if not trusted.is_dir():
        raise UserError(f"--trust {trusted}: there is no such folder")
    latest = trusted / "latest"
    folder = trusted / latest.read_text().strip() if latest.is_file() else trusted
    if not list(folder.glob("*_optim_states.pt")):
        raise UserError(
            f"--trust {trusted}: {folder} has no *_optim_states.pt, so ZeRO did not write it; name the folder that was "
            "given to DeepSpeed's save_checkpoint, or one of the tags in it"
        )
    return folder


def _load(folder: Path, kind: str) -> list[Any]:
    """The files of all ranks, in their order."""
    files = sorted(folder.glob(f"*{kind}.pt"), key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    if not files:
        raise UserError(f"--trust {folder}: there is no *{kind}.pt")
    try:
        return [torch.load(file, map_location="cpu", mmap=True, weights_only=False) for file in files]
    except Exception as error:  # a damaged pickle fails in many ways
        raise UserError(f"{folder} cannot be read: {one_line(error)}") from None


def _frozen(models: list[Any], stage: int) -> Iterator[tuple[str, Tensor]]:
    """What is not trained: in a part on every rank under stage 3; whole below, and under stage 1 not even listed."""
    if stage == 3:
        for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
            parts = [model["frozen_param_fragments"][name].flatten() for model in models]
            yield name, torch.cat(parts)[: prod(shape)].view(*shape)
        return
    tensors = {name: tensor for name, tensor in models[0]["module"].items() if isinstance(tensor, Tensor)}
    trained = {name for shapes in models[0]["param_shapes"] for name in shapes}
    seen = {(tensors[name].data_ptr(), tensors[name].shape) for name in trained if name in tensors}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape)  # what is tied has several names
        if name not in trained and name not in models[0]["buffer_names"] and place not in seen:
            seen.add(place)
            yield name, tensor


def _cut_below_3(flats: list[list[Tensor]], shapes: Shapes, parts: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """A group is one stretch over all ranks, in an order of its own; each rank's file says where in its part what is.

    Lengths say nothing: what fills a part up is cut off the weights, and mostly not off what the optimizer keeps.
    """
    if "param_slice_mappings" not in parts[0]:
        raise _Unlike("it does not say where parameters lie, so an old DeepSpeed wrote it; save it with a newer one")
    pieces: dict[str, list[Tensor]] = {}
    for rank, part in zip(flats, parts, strict=True):
        for flat, places in zip(rank, part["param_slice_mappings"], strict=True):
            for name, place in places.items():
                pieces.setdefault(name, []).append(flat[place.start : place.start + place.numel])
    for name, shape in shapes.items():
        yield name, torch.cat(pieces[name]).view(*shape)


def _cut_stage_3(flats: list[list[Tensor]], shapes: Shapes, parts: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Each rank has its part of every parameter, one after the other, all as long as the first rank's."""
    ranks, start = [torch.cat([group.flatten() for group in rank]) for rank in flats], 0
    for name, shape in shapes.items():
        share = ceil(prod(shape) / len(ranks))
        yield name, torch.cat([rank[start : start + share] for rank in ranks])[: prod(shape)].view(*shape)
        start += share
    if any(len(rank) != start for rank in ranks):
        raise _Unlike(f"ranks have {[*map(len, ranks)]} elements, where their parameters have {start}")


def _cut_slot(
    slot: str, values: list[list[Any]], cut: Callable[..., Iterator[tuple[str, Tensor]]], names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer keeps under one name: cut as the weights are, or one number for all."""
    dims = {value.ndim if isinstance(value, Tensor) else type(value) for rank in values for value in rank}
    if dims == {1}:
        yield from cut(values)
        return
    numbers = {float(value) for rank in values for value in rank} if dims <= {0, int, float} else set()
    if len(numbers) != 1:
        raise _Unlike(f"the optimizer's {slot} is neither laid out as weights are nor one number")
    (number,) = numbers
    yield from ((name, torch.tensor(number, dtype=torch.float32)) for name in names)
