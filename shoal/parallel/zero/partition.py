"""DeepSpeed's internals: everything that shoal uses and DeepSpeed does not document is in this file, with the reason.
Its checkpoint files are in checkpoint/deepspeed_import.py.

ZeRO keeps partitions in flat tensors: a rank's part of a parameter is a stretch of its elements in memory order, which
begins and ends anywhere. A checkpoint wants rows. `exchange` turns one into the other, one parameter at a time.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from math import ceil, prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.errors import UserError
from shoal.parallel.collectives import all_gather_single
from shoal.tensors import replace_parameters
from shoal.torch_private import as_rows

_LINEAR = nn.functional.linear


class Stretch(NamedTuple):
    """Consecutive elements of a flattened tensor."""

    start: int
    numel: int

    def overlap(self, other: Stretch) -> Stretch:
        start = max(self.start, other.start)
        return Stretch(start, max(0, min(self.start + self.numel, other.start + other.numel) - start))


def is_installed() -> bool:
    """Returns whether the package is there. A mere folder of that name could be imported, too, as an empty package."""
    spec = find_spec("deepspeed")
    return spec is not None and spec.origin is not None


def load_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for this kind of device; left to itself it would guess, and print that."""
    if not is_installed():
        raise UserError(
            "strategy deepspeed, and its checkpoints, need the package deepspeed: pip install 'shoal[deepspeed]'"
        )
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    with _silent():  # it tries compilers, which print errors
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
    # It calls collectives by names that torch 2.13 warns about.
    warnings.filterwarnings("ignore", "`torch.distributed.[a-z_]+` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # the report says what matters
    if get_accelerator().device_name() != device.type:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CPU_Accelerator() if device.type == "cpu" else CUDA_Accelerator())
    return deepspeed


@contextmanager
def _silent() -> Iterator[None]:
    """Discards what this process, and programs that it starts, write to stderr."""
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


class Connection:
    """What DeepSpeed needs in the environment while a process group exists; `close` takes it back."""

    def __init__(self, deepspeed: Any, device: torch.device, local_size: int):
        self._deepspeed = deepspeed
        # DeepSpeed takes the device index from LOCAL_RANK, which is wrong where ranks share a device.
        self._variables = {"LOCAL_RANK": str(device.index or 0), "LOCAL_SIZE": str(local_size)}
        self._before: dict[str, str | None] = {}

    def open(self) -> None:
        self._forget()  # a run that failed in this process may have left its groups
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ |= self._variables
        # Otherwise it compiles a shared-memory collective at its first use, for two minutes.
        self._deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)

    def close(self) -> None:
        self._forget()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}

    def _forget(self) -> None:
        """Makes DeepSpeed forget the process group, and undoes what it changed for the whole process."""
        from deepspeed.utils import groups

        self._deepspeed.comm.comm.cdb = None
        groups._release_process_group_references()
        nn.functional.linear = _LINEAR  # which ZeRO-3 replaces


class Partition:
    """Where ZeRO keeps this rank's elements of every parameter, by the parameter's name."""

    def __init__(self, engine: Any, names: Mapping[nn.Parameter, str]):
        self.engine, self.zero, self.stage = engine, engine.optimizer, engine.zero_optimization_stage()
        self.base: Optimizer = self.zero.optimizer
        self._share_weights()
        self.group: dict[str, int] = {}
        """The index in `flats` of the tensor that holds a trained parameter."""
        self.offset: dict[str, int] = {}
        """Where in that tensor this rank's elements of the parameter begin."""
        self.own = {name: self._own_part(parameter) for parameter, name in names.items()}
        """Which elements of the parameter these are."""
        for group, parameters in enumerate(self.zero.fp16_groups if self.stage == 3 else self.zero.bit16_groups):
            for parameter in parameters:
                self.group[names[parameter]] = group
                self.offset[names[parameter]] = self._place(parameter)
        self.members: dict[int | None, dict[str, nn.Parameter]] = {}
        """The parameters of each group that is stepped together; those of None are frozen."""
        for parameter, name in names.items():
            self.members.setdefault(self.group.get(name), {})[name] = parameter
        everyone: list[dict[str, Stretch]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.own)
        self.stretches = {name: [rank[name] for rank in everyone] for name in names.values()}

    def _share_weights(self) -> None:
        """Makes the weights that DeepSpeed steps and those that compute one memory, if they have one type and device.

        DeepSpeed would keep a copy; what it does after a step is then to copy the memory onto itself.
        """
        if self.stage == 3:
            computing = self.zero.fp16_partitioned_groups_flat
        else:
            computing = [parts[dist.get_rank()] for parts in self.zero.parallel_partitioned_bit16_groups]
        for group, (flat, same) in enumerate(zip(self.flats, computing, strict=True)):
            in_memory = same is not None and not self.on_disk(group)
            if in_memory and (flat.dtype, flat.device) == (same.dtype, same.device):
                flat.data = same
        if self.stage < 3:
            self.zero._link_all_hp_params()  # which are views of the old memory

    def _own_part(self, parameter: Any) -> Stretch:
        if self.stage == 3:
            share = parameter.partition_numel()
            start = min(dist.get_rank() * share, parameter.ds_numel)
            return Stretch(start, min(share, parameter.ds_numel - start))
        mapping = getattr(parameter, "_hp_mapping", None)
        return (
            Stretch(mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel) if mapping else Stretch(0, 0)
        )

    def _place(self, parameter: Any) -> int:
        if self.stage == 3:
            _, offset, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
            return int(offset)
        return parameter._hp_mapping.hp_fragment_address.start if parameter._hp_mapping else 0

    @property
    def flats(self) -> list[Tensor]:
        """The flat fp32 tensors that the optimizer steps on this rank."""
        return self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups

    def on_disk(self, group: int | None) -> bool:
        """Returns whether the optimizer state of a group is in files; memory then holds one group at a time."""
        return self.stage == 3 and group is not None and bool(self.zero._swappable_optimizer_subgroup(group))

    @contextmanager
    def at_hand(self, group: int | None, write: bool = False) -> Iterator[None]:
        """Loads the optimizer state of a group into memory, if it is in files.

        With `write`, changed state goes back to the files, and under ZeRO-3 changed weights to those of the forward.
        """
        on_disk = self.on_disk(group)
        if on_disk:
            self.zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if write and self.stage == 3 and group is not None:
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if on_disk and write:
            self.zero._optimizer_states_and_gradient_swap_out(group)
        elif on_disk:
            self.zero._release_swap_buffers(group)

    def part(self, name: str, flat: Tensor) -> Tensor:
        """Returns this rank's elements of a parameter in a tensor that is laid out as the one in `flats`."""
        return flat.detach()[self.offset[name] :][: self.own[name].numel]

    def weights(self, name: str, parameter: Any) -> Tensor:
        """Returns this rank's elements of a parameter under ZeRO-3, in fp32 and without padding."""
        if name in self.group:
            return self.part(name, self.flats[self.group[name]])
        with _in_memory(parameter) as moved:
            own: Tensor = parameter.ds_tensor.detach()[: self.own[name].numel]
            return own.clone() if moved else own

    def put_weights(self, name: str, parameter: Any, own: Tensor) -> None:
        if name in self.group:
            self.part(name, self.flats[self.group[name]]).copy_(own)
        else:
            with _in_memory(parameter, write=True):
                parameter.ds_tensor.detach()[: len(own)].copy_(own)

    def slots(self, name: str) -> dict[str, Tensor]:
        """Returns the optimizer's slots for this rank's elements of a parameter, and numbers for all elements."""
        if name not in self.group:
            return {}
        flat = self.flats[self.group[name]]
        kept = {slot: value for slot, value in self.base.state.get(flat, {}).items() if isinstance(value, Tensor)}
        return {slot: self.part(name, value) if value.shape == flat.shape else value for slot, value in kept.items()}

    def forget_slots(self) -> None:
        self.base.state.clear()
        if self.stage == 3 and self.zero.swap_optimizer:
            self.zero.optimizer_swapper.purge_state()

    def new_slot(self, name: str, slot: str) -> Tensor:
        """Returns the memory of a slot for this rank's elements; the slot is made of zeros if it does not exist."""
        flat = self.flats[self.group[name]]
        state = self.base.state[flat]
        if slot not in state:
            state[slot] = torch.zeros_like(flat, requires_grad=False)
        return self.part(name, state[slot])

    def set_number(self, name: str, slot: str, value: Tensor) -> Tensor:
        """Sets a slot that is one number for all elements, such as the step count, and returns its value."""
        flat = self.flats[self.group[name]]
        kept: Tensor = self.base.state[flat].setdefault(slot, value.to(flat.device, copy=True))
        return kept

    def parameter_bytes(self, model: nn.Module) -> int:
        """Returns the bytes of all weights on this rank: those that compute, and those that are stepped if apart."""
        held: list[Tensor] = [*model.parameters(), *self.flats]
        held += [p.ds_tensor for p in model.parameters() if self.stage == 3]  # type: ignore[attr-defined]
        storages = [tensor.untyped_storage() for tensor in held]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @torch.no_grad()
    def publish_weights(self) -> None:
        """Makes the weights in `flats`, which were changed, those that all ranks compute with."""
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        for group in self.members:
            with self.at_hand(group, write=True):
                pass
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Is called after all weights and slots were loaded."""
        if self.stage < 3:
            self.zero.refresh_fp32_params()
            if all(flat in self.base.state for flat in self.flats):
                # It holds views of the optimizer's tensors, and so keeps the memory of the old ones alive.
                self.zero._hp_optimizer_states_linked = False
                self.zero._lazy_init_hp_params_optimizer_state()
            return
        self.engine.empty_partition_cache()
        if kept := self.zero.persistent_parameters:  # small parameters, which are whole on every rank
            kept[0].all_gather(kept)

    def step(self, max_norm: float | None, loss_scale: float) -> tuple[Tensor | float, bool]:
        """Updates, and returns the norm and whether the update was skipped."""
        zero = self.zero
        zero.clip_grad, zero.external_loss_scale, zero.custom_loss_scaler = max_norm or 0.0, loss_scale, True
        try:
            self.engine.step()
        finally:
            zero.custom_loss_scaler = False  # otherwise the next loss would be scaled again
        return self.engine.get_global_grad_norm(), bool(zero.overflow)


@contextmanager
def _in_memory(parameter: Any, write: bool = False) -> Iterator[bool]:
    """Has this rank's part of a parameter in memory; yields whether it was on a disk."""
    moved = parameter.ds_tensor.status.name == "NOT_AVAILABLE"
    if moved:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    yield moved
    if moved and write:
        parameter.nvme_swapper.swap_out_and_release([parameter])
    elif moved:
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


def cut_into_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces parameters on meta by DTensors of rows, so that each rank allocates its rows alone."""

    def rows_of(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta:
            return parameter
        shape = tuple(parameter.shape)
        rows = row_stretches(shape, mesh.size())[mesh.get_local_rank()].numel // max(1, prod(shape[1:]))
        local = torch.empty(rows, *shape[1:], dtype=parameter.dtype, device="meta")
        return nn.Parameter(as_rows(local, shape, mesh), requires_grad=parameter.requires_grad)

    replace_parameters(model, rows_of)


@torch.no_grad()
def partition_each(deepspeed: Any, config: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Partitions a model for ZeRO-3 one parameter at a time, so that no rank holds more than one of them whole.

    Parameters in rows are gathered first. The optimizer, which was built before, gets the new parameters.
    """
    init = deepspeed.zero.Init(config_dict_or_path=config)  # without half precision in the config: fp32
    _use_lean_linear()

    def partitioned(parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, DTensor):
            parameter = nn.Parameter(_gather_rows(parameter), requires_grad=parameter.requires_grad)
        init._convert_to_zero_parameters([parameter])
        return parameter

    made = replace_parameters(model, partitioned)
    for group in optimizer.param_groups:
        group["params"] = [made[id(parameter)] for parameter in group["params"]]


def _use_lean_linear() -> None:
    """Replaces F.linear by DeepSpeed's, which does not keep gathered weights for the backward, without its rounding
    before the bias is added."""
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    class Lean(LinearFunctionForZeroStage3):
        @staticmethod
        def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return _LINEAR(input, weight, bias)

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return Lean.apply(input, weight, bias)

    nn.functional.linear = linear


@torch.no_grad()
def set_gradient(parameter: Any, gradient: Tensor) -> None:
    """Replaces the gradient that a backward has left of a parameter; this rank takes its elements of the whole one.

    By DeepSpeed's public functions. The one for whole gradients fails under ZeRO-3 where ranks cannot divide the
    elements evenly, so there the one for a rank's part is used, with the padding at its end. Under ZeRO 1 and 2 with an
    offloaded optimizer DeepSpeed has noted the norm during the backward, and the function does not note the new one.
    """
    from deepspeed.utils import safe_set_full_grad, safe_set_local_grad

    if hasattr(parameter, "ds_id"):
        numel = parameter.partition_numel()
        own = gradient.flatten()[dist.get_rank() * numel :][:numel]
        safe_set_local_grad(parameter, nn.functional.pad(own, (0, numel - len(own))).to(parameter.device))
        return
    safe_set_full_grad(parameter, gradient.to(parameter.device))
    mapping = parameter._hp_mapping
    if mapping and mapping.use_offload:
        zero, fragment = parameter._zero_optimizer, mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        zero.norm_for_param_grads[zero.get_param_id(parameter)] = fragment.double().norm()


def is_here(parameter: Any) -> bool:
    """Returns whether a parameter is gathered at this moment, under ZeRO-3."""
    return bool(parameter.ds_status.name == "AVAILABLE")


def _gather_rows(tensor: DTensor) -> Tensor:
    ranks, rows = tensor.device_mesh.size(), len(tensor)
    local, most = tensor.to_local().detach(), ceil(rows / ranks)
    padded = local.new_zeros(most, *tensor.shape[1:])
    padded[: len(local)] = local
    gathered = local.new_empty(ranks * most, *tensor.shape[1:])
    all_gather_single(gathered, padded)
    return gathered[:rows].clone()  # without the padding


def row_stretches(shape: tuple[int, ...], ranks: int) -> list[Stretch]:
    """Returns the elements that each rank holds of a tensor that is split along its first dimension, as by Shard(0)."""
    rows, row = shape[0], prod(shape[1:])
    most = ceil(rows / ranks)
    starts = [min(rank * most, rows) for rank in range(ranks + 1)]
    return [Stretch(start * row, (end - start) * row) for start, end in pairwise(starts)]


def exchange(own: Tensor, before: list[Stretch], after: list[Stretch]) -> Tensor:
    """Exchanges the elements of a tensor between all ranks: each has `before` and gets `after`.

    It goes through the host's memory, where the elements come from or go to; nothing is done if both are equal.
    """
    if before == after:
        return own
    rank = dist.get_rank()
    give = [before[rank].overlap(to) for to in after]
    take = [after[rank].overlap(source) for source in before]
    sent = torch.cat([own[s.start - before[rank].start :][: s.numel] for s in give]).cpu()
    got = torch.empty(sum(s.numel for s in take), dtype=own.dtype)
    dist.all_to_all_single(got, sent, [s.numel for s in take], [s.numel for s in give])
    return got
