"""DeepSpeed import: converts a checkpoint that DeepSpeed wrote, ZeRO stages 1 to 3, into one of shoal.

DeepSpeed's files are pickles, and opening a pickle can run code. So only a command that names the folder as trusted
opens them. The files are

    TAG/*model_states.pt   names and shapes of the parameters; under stage 3 also frozen parameters; buffers
    TAG/*optim_states.pt   of every rank: its partition of the fp32 weights and of the optimizer's state
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
from shoal.errors import UserError, as_user_error, one_line
from shoal.parallel.zero.partition import load_deepspeed
from shoal.types import TrainState

Shapes = dict[str, torch.Size]
"""The shapes of the trained parameters by name, in the order in which ZeRO partitioned them."""


def import_deepspeed(trusted: Path, out: Path) -> dict[str, Any]:
    """Converts the checkpoint in `trusted`, whose pickles are opened, into a checkpoint `out`.

    Returns what `shoal checkpoint import --json` prints.
    """
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} exists; choose a new folder")
    folder = _find_tag_folder(trusted)
    load_deepspeed(torch.device("cpu"))  # the pickles refer to its classes
    models, files = _load(folder, "model_states"), _load(folder, "optim_states")
    try:
        step, partitions = int(models[0].get("global_steps", 0)), [file["optimizer_state_dict"] for file in files]
        stage = int(partitions[0].get("zero_stage", 1))  # with bf16 weights and fp32 sums, stage 1 is not recorded
        state, names = _join_partitions(models, partitions, stage)
    except Exception as error:  # the format is not documented, so anything may be missing or different
        reason = one_line(error) if isinstance(error, _UnknownFormat) else f"{type(error).__name__} {one_line(error)}"
        raise UserError(f"{folder} has a format that shoal does not know: {reason}") from None
    layout = {"strategy": "deepspeed", "world_size": len(files), "data_size": len(files)}
    write_checkpoint(out, state, {"step": step}, {"layout": layout, **names, "imported_from": str(folder)})
    return {
        "path": str(out),
        "stage": stage,
        "ranks": len(files),
        "step": step,
        "tensors": len(state.model),
        "slots": sorted({slot for slots in state.optimizer.values() for slot in slots}),
    }


class _UnknownFormat(Exception):
    """A DeepSpeed checkpoint is not as expected; the message says in which way."""


def _join_partitions(models: list[Any], partitions: list[Any], stage: int) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state with whole tensors, and the manifest's entries `tied` and `buffers`.

    `models` and `partitions` are the contents of the two kinds of files, one for each rank.
    """
    first, ranks, counts = models[0], len(partitions), partitions[0]["partition_count"]
    if stage not in (1, 2, 3) or (max(counts) if isinstance(counts, list) else counts) != ranks:
        raise _UnknownFormat(f"it has files of {ranks} ranks, but was written by {counts} at ZeRO stage {stage}")
    shapes: Shapes = {name: shape for group in first["param_shapes"] for name, shape in group.items()}
    weights = [part["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for part in partitions]
    states = [part["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for part in partitions]
    split = partial(_split_stage_3 if stage == 3 else _split_stages_1_and_2, shapes=shapes, partitions=partitions)
    buffers = [*first["buffer_names"]]
    model = {name: first["module"][name] for name in buffers if name in first["module"]}
    model |= dict(_frozen_parameters(models, stage)) | dict(split(weights))
    model = {name: tensor.detach().contiguous() for name, tensor in model.items()}
    optimizer: dict[str, dict[str, Tensor]] = {}
    # The state of each group is in a list if zero_optimization.elastic_checkpoint was set, and else in a dict.
    groups = [
        s if isinstance(s, list) else [s["state"].get(group, {}) for group in range(len(weights[0]))] for s in states
    ]
    for slot in sorted({slot for group in groups[0] for slot, value in group.items() if value is not None}):
        for name, value in _split_slot(slot, [[group.get(slot) for group in rank] for rank in groups], split, shapes):
            optimizer.setdefault(name, {})[slot] = value
    tied = {alias: name for alias, name in dict(first.get("shared_params") or {}).items() if name in model}
    return TrainState(model, optimizer), {"tied": tied, "buffers": buffers}


def _find_tag_folder(trusted: Path) -> Path:
    """Returns the folder with DeepSpeed's files: `trusted` itself, or the tag that its file `latest` names."""
    if not trusted.is_dir():
        raise UserError(f"--trust {trusted}: no such folder")
    latest = trusted / "latest"
    folder = trusted / latest.read_text().strip() if latest.is_file() else trusted
    if not list(folder.glob("*_optim_states.pt")):
        raise UserError(
            f"--trust {trusted}: {folder} has no *_optim_states.pt, so ZeRO did not write it; give the folder that was "
            "given to DeepSpeed's save_checkpoint, or one of the tags in it"
        )
    return folder


def _load(folder: Path, kind: str) -> list[Any]:
    """Returns the contents of all ranks' files of one kind, in the order of the ranks."""
    files = sorted(folder.glob(f"*{kind}.pt"), key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    if not files:
        raise UserError(f"--trust {folder}: it has no *{kind}.pt")
    with as_user_error(f"{folder} cannot be read", Exception):  # a damaged pickle fails in many ways
        return [torch.load(file, map_location="cpu", mmap=True, weights_only=False) for file in files]


def _frozen_parameters(models: list[Any], stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters that are not trained.

    Under stage 3 every rank has a fragment of each; below, rank 0 has them whole, among all tensors of the module.
    """
    if stage == 3:
        for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
            fragments = [model["frozen_param_fragments"][name].flatten() for model in models]
            yield name, torch.cat(fragments)[: prod(shape)].view(*shape)
        return
    tensors = {name: tensor for name, tensor in models[0]["module"].items() if isinstance(tensor, Tensor)}
    trained = {name for shapes in models[0]["param_shapes"] for name in shapes}
    seen = {(tensors[name].data_ptr(), tensors[name].shape) for name in trained if name in tensors}
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.shape)  # a tied tensor has several names
        if name not in trained and name not in models[0]["buffer_names"] and memory not in seen:
            seen.add(memory)
            yield name, tensor


def _split_stages_1_and_2(
    flats: list[list[Tensor]], shapes: Shapes, partitions: list[Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yields whole tensors by name from the flat tensors of each rank and parameter group.

    A group is one flat tensor over all ranks, in an order of its own. Each rank's file says which slice of its
    partition belongs to which parameter. The lengths alone would not do: the padding of a partition is removed from
    the weights, and mostly not from the optimizer's state.
    """
    if "param_slice_mappings" not in partitions[0]:
        raise _UnknownFormat("it does not say where parameters are, so an old DeepSpeed wrote it; save it with a newer")
    slices: dict[str, list[Tensor]] = {}
    for rank_flats, partition in zip(flats, partitions, strict=True):
        for flat, addresses in zip(rank_flats, partition["param_slice_mappings"], strict=True):
            for name, address in addresses.items():
                slices.setdefault(name, []).append(flat[address.start : address.start + address.numel])
    for name, shape in shapes.items():
        yield name, torch.cat(slices[name]).view(*shape)


def _split_stage_3(flats: list[list[Tensor]], shapes: Shapes, partitions: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields whole tensors by name from the flat tensors of each rank and parameter group.

    Each rank has an equal slice of every parameter, one after another, the last ones padded.
    """
    ranks, start = [torch.cat([group.flatten() for group in rank]) for rank in flats], 0
    for name, shape in shapes.items():
        length = ceil(prod(shape) / len(ranks))
        yield name, torch.cat([rank[start : start + length] for rank in ranks])[: prod(shape)].view(*shape)
        start += length
    if any(len(rank) != start for rank in ranks):
        raise _UnknownFormat(f"the ranks have {[*map(len, ranks)]} elements, but their parameters have {start}")


def _split_slot(
    slot: str, values: list[list[Any]], split: Callable[..., Iterator[tuple[str, Tensor]]], names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields one slot of the optimizer's state by parameter: split like the weights, or one number for all."""
    dims = {value.ndim if isinstance(value, Tensor) else type(value) for rank in values for value in rank}
    if dims == {1}:
        yield from split(values)
        return
    numbers = {float(value) for rank in values for value in rank} if dims <= {0, int, float} else set()
    if len(numbers) != 1:
        raise _UnknownFormat(f"the optimizer's {slot} is neither partitioned like the weights nor a single number")
    (number,) = numbers
    yield from ((name, torch.tensor(number, dtype=torch.float32)) for name in names)
