"""Checkpoints that DeepSpeed wrote, ZeRO 1 to 3, made into one of ours.

They are pickles: opening one runs whatever it says. So this is done by a command that names the folder as trusted,
and by nothing else. What is read:

    TAG/*model_states.pt   names and shapes, in the order in which ZeRO laid parameters end to end; frozen ones; buffers
    TAG/*optim_states.pt   of every rank: its stretch of the fp32 weights and of what the optimizer keeps
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.store import write_checkpoint
from shoal.errors import UserError
from shoal.parallel.zero import load_deepspeed
from shoal.types import TrainState


@dataclass(frozen=True)
class Imported:
    """What came out of a folder."""

    path: Path
    stage: int
    ranks: int
    step: int
    tensors: int
    slots: list[str]


def import_deepspeed(trusted: Path, out: Path) -> Imported:
    """Makes the checkpoint in `trusted`, which is opened as a pickle, into a neutral one."""
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} exists; name a new folder")
    folder = _find(trusted)
    load_deepspeed(torch.device("cpu"))  # its pickles name its classes
    models, parts = (
        _load(folder, "model_states"),
        [file["optimizer_state_dict"] for file in _load(folder, "optim_states")],
    )
    first = models[0]
    stage, ranks = int(parts[0]["zero_stage"]), len(parts)
    counts = parts[0]["partition_count"]
    if stage not in (1, 2, 3) or (max(counts) if isinstance(counts, list) else counts) != ranks:
        raise UserError(f"{folder} has the parts of {ranks} ranks, but was written by {counts} at ZeRO stage {stage}")
    flats = [part["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for part in parts]
    states = [part["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for part in parts]
    cut = _cut_stage_3 if stage == 3 else _cut_below_3
    model = {name: first["module"][name] for name in first["buffer_names"] if name in first["module"]}
    model |= dict(_frozen(models, stage)) | dict(cut(flats, first, parts[0]))
    optimizer: dict[str, dict[str, Tensor]] = {}
    by_group = [[state["state"].get(group, {}) for group in range(len(flats[0]))] for state in states]
    slots = sorted({slot for group in by_group[0] for slot in group})
    for slot in slots:
        for name, value in _cut_slot(slot, by_group, flats, cut, first, parts[0]):
            optimizer.setdefault(name, {})[slot] = value
    layout = {"strategy": "deepspeed", "world_size": ranks, "data_size": ranks}
    tied = {alias: name for alias, name in dict(first.get("shared_params") or {}).items() if name in model}
    about = {"layout": layout, "tied": tied, "buffers": [*first["buffer_names"]], "imported_from": str(folder)}
    step = int(first.get("global_steps", 0))
    whole = {name: tensor.detach().contiguous() for name, tensor in model.items()}
    write_checkpoint(out, TrainState(whole, optimizer), {"step": step}, about)
    return Imported(out, stage, ranks, step, len(whole), slots)


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
    files = sorted(
        folder.glob(f"*{kind}.pt"), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)]
    )
    if not files:
        raise UserError(f"--trust {folder}: there is no *{kind}.pt")
    load: Callable[..., Any] = torch.load
    try:
        return [load(file, map_location="cpu", mmap=True, weights_only=False) for file in files]
    except Exception as error:  # a damaged pickle fails in many ways
        raise UserError(f"{folder} cannot be read: {' '.join(str(error).split())[:200]}") from None


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


def _cut_below_3(flats: list[list[Tensor]], model: Any, part: Any) -> Iterator[tuple[str, Tensor]]:
    """Each group is one stretch over all ranks, parameter after parameter."""
    fillings = part.get("param_alignment_paddings") or [[0] * len(shapes) for shapes in model["param_shapes"]]
    for group, shapes in enumerate(model["param_shapes"]):
        whole, start = torch.cat([rank[group] for rank in flats]), 0
        for (name, shape), filling in zip(shapes.items(), fillings[group], strict=True):
            yield name, whole[start : start + prod(shape)].view(*shape).clone()
            start += prod(shape) + filling


def _cut_stage_3(flats: list[list[Tensor]], model: Any, part: Any) -> Iterator[tuple[str, Tensor]]:
    """Each rank has its part of every parameter, one after the other, all as long as the first rank's."""
    ranks, start = [torch.cat([group.flatten() for group in rank]) for rank in flats], 0
    for name, shape in ((name, shape) for shapes in model["param_shapes"] for name, shape in shapes.items()):
        share = ceil(prod(shape) / len(ranks))
        yield name, torch.cat([rank[start : start + share] for rank in ranks])[: prod(shape)].view(*shape)
        start += share


def _cut_slot(
    slot: str, by_group: list[list[Any]], flats: list[list[Tensor]], cut: Callable[..., Any], model: Any, part: Any
) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer keeps under one name: cut as the weights are, or a number for all of a group."""
    values = [[group.get(slot) for group in rank] for rank in by_group]
    alike = [
        [isinstance(value, Tensor) and value.shape == flat.shape for value, flat in zip(*pair, strict=True)]
        for pair in zip(values, flats, strict=True)
    ]
    if all(map(all, alike)):
        yield from cut(values, model, part)
    elif isinstance(number := values[0][0], Tensor | int | float):
        told = torch.as_tensor(number, dtype=torch.float32)
        for name in (name for shapes in model["param_shapes"] for name in shapes):
            yield name, told.clone()
