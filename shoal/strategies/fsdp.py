"""Shards: every rank holds a part of each parameter, and gathers the whole of a unit only while it computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from shoal.config.mesh import fill_mesh, say_mesh
from shoal.config.schema_distributed import FSDPConfig
from shoal.errors import UserError
from shoal.parallel.sharding.shards import drop_gradients, hold_shards, split_over, take_gradients, total_norm
from shoal.parallel.sharding.units import choose_units
from shoal.strategies.base import DistributedStrategy, Objective
from shoal.strategies.buffers import MovingBuffers
from shoal.tensors import local_part
from shoal.torch_private import uncompiled
from shoal.transform.loss_scale import LossScale
from shoal.transform.precision import DTYPES, half_type
from shoal.types import MicroBatch, ParallelPlan, StepOutput, TrainState, Weights
from shoal.weights.by_name import DRAWN, materialise, move_buffers

CPU = torch.device("cpu")

OF_FULLY_SHARD = (
    "sharding_strategy",
    "auto_wrap_policy",
    "min_num_params",
    "wrap_classes",
    "reduce_dtype",
    "reduce_every_micro_batch",
    "forward_prefetch",
)
"""Keys that say how it shards and sums, and mean nothing where the plain model computes."""


class FSDPStrategy(DistributedStrategy):
    """torch's fully_shard over the mesh dimension `dp_shard`, replicated over `dp_replicate`.

    On one process the plain model computes, unless `pure_bf16` or `cpu_offload` need fully_shard there, too.
    """

    name = "fsdp"
    needs_mesh = True

    def __init__(
        self,
        *,
        sharding_strategy: str = "FULL_SHARD",
        mesh: Mapping[str, int] | None = None,
        auto_wrap_policy: str | None = None,
        min_num_params: int | None = None,
        wrap_classes: Sequence[str] | None = None,
        cpu_offload: bool = False,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        buffer_dtype: str | None = None,
        reduce_every_micro_batch: bool = False,
        forward_prefetch: bool = False,
        **options: Any,
    ):
        checked = {
            "sharding_strategy": sharding_strategy,
            "auto_wrap_policy": auto_wrap_policy,
            "min_num_params": min_num_params,
            "wrap_classes": None if wrap_classes is None else [*wrap_classes],
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "buffer_dtype": buffer_dtype,
            "reduce_every_micro_batch": reduce_every_micro_batch,
            "forward_prefetch": forward_prefetch,
        }
        try:
            self._options = FSDPConfig(**checked)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            where = f"FSDPStrategy({first['loc'][0]}={first['input']!r}): " if first["loc"] else "FSDPStrategy: "
            raise UserError(f"{where}{first['msg'].removeprefix('Value error, ')}") from None
        self.sharding_strategy, self._wanted_mesh = sharding_strategy, mesh
        super().__init__(**options)
        self._wrap = {"policy": auto_wrap_policy, "min_num_params": min_num_params, "classes": wrap_classes}
        self.reduce_every_micro_batch, self.forward_prefetch = reduce_every_micro_batch, forward_prefetch
        self.param_dtype = param_dtype or ("bf16" if self.precision == "pure_bf16" else "fp32")
        self.reduce_dtype, self.buffer_dtype = reduce_dtype or "fp32", buffer_dtype
        self.cpu_offload = cpu_offload
        self.units: list[str] = []
        self._buffers = MovingBuffers(self.broadcast)
        self._used: int | None = None
        self._check_options()
        if cpu_offload and self.loss_scale:
            self.loss_scale = LossScale(CPU)

    def _check_options(self) -> None:
        if self.device.type not in ("cpu", "cuda"):
            raise UserError(f"distributed.strategy = fsdp runs on cuda and cpu, not on {self.device.type}; use single")
        if self.cpu_offload and self.device.type == "cpu":
            raise UserError(
                "distributed.fsdp.cpu_offload = true needs a GPU to offload from, but the run is on the CPU; "
                "leave it out"
            )
        half = half_type(self.precision)
        param_type = DTYPES[self.param_dtype]
        if param_type != torch.float32 and param_type != half:
            raise UserError(
                f"distributed.fsdp.param_dtype = {self.param_dtype}, but training.mixed_precision = {self.precision} "
                f"computes in {'fp32' if half is None else 'another half type'}; leave it out or make them agree"
            )
        if self.precision == "pure_bf16" and param_type == torch.float32:
            raise UserError(
                "training.mixed_precision = pure_bf16 gathers parameters in bf16, but distributed.fsdp.param_dtype = "
                "fp32; leave that out, or use mixed_precision: bf16"
            )

    def mesh_sizes(self) -> dict[str, int]:
        """Who shards and who replicates."""
        size, given = self.world.size, dict(self._wanted_mesh or {})
        for side in ("pp", "cp", "tp"):
            if given.pop(side, 1) != 1:
                raise UserError(
                    f"distributed.mesh.{side} = {(self._wanted_mesh or {})[side]} is not for strategy fsdp; use mesh"
                )
        if self.sharding_strategy == "HYBRID_SHARD":
            if not given:  # as FSDP has always meant it: shards within a machine, replicas over machines
                given = {"dp_replicate": size // self.world.local_size, "dp_shard": self.world.local_size}
            sizes = fill_mesh(given, size)
            if min(sizes.values()) < 2 and size > 1:
                raise UserError(
                    f"distributed.fsdp.sharding_strategy = HYBRID_SHARD on {sizes['dp_replicate']} replicas × "
                    f"{sizes['dp_shard']} shards is not hybrid; set distributed.mesh, such as {{dp_replicate: 2, "
                    "dp_shard: -1}, or use FULL_SHARD or NO_SHARD"
                )
            return sizes
        implied = {"dp_replicate": size, "dp_shard": 1} if self.sharding_strategy == "NO_SHARD" else {"dp_shard": size}
        if given:
            sizes = fill_mesh(given, size)
            if {key: n for key, n in sizes.items() if n > 1} != {key: n for key, n in implied.items() if n > 1}:
                raise UserError(
                    f"distributed.mesh = {given} is not what sharding_strategy {self.sharding_strategy} means on "
                    f"{size} processes; use HYBRID_SHARD, or leave the mesh out"
                )
        return implied

    def about(self) -> str:
        assert self.mesh is not None
        if not isinstance(self.engine, FSDPModule):
            return f"fsdp {self.sharding_strategy}, one process and so nothing to shard"
        replicas, shards = self.mesh["dp_replicate"].size(), self.mesh["dp_shard"].size()
        spread = f"{replicas} replicas × {shards} shards" if replicas > 1 else f"{shards} shards"
        units = f"{len(self.units)} units and the rest" if self.units else "the whole model at once"
        offload = ", parameters in the host's memory" if self.cpu_offload else ""
        return f"fsdp {self.sharding_strategy}, {spread}, {units}{offload}"

    def place(self, model: nn.Module, plan: ParallelPlan, weights: Weights = DRAWN) -> nn.Module:
        self._shard(model, plan)
        for module in self._fsdp_modules(model):
            # Losses are already divided by the global count. The factor alone would not do: gloo cannot premultiply.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        materialise(model, self.device, self.seed, weights, parameters_on=CPU if self.cpu_offload else None)
        self._cast_buffers(model)
        return model

    def wrap(self, model: nn.Module, plan: ParallelPlan) -> nn.Module:
        self._shard(model, plan)
        if self.cpu_offload:
            move_buffers(model, self.device)
        else:
            model.to(self.device)
        self._cast_buffers(model)
        return model

    def _shard(self, model: nn.Module, plan: ParallelPlan) -> None:
        self.units = choose_units(model, plan, **self._wrap)  # type: ignore[arg-type]
        if scalars := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
            raise UserError(
                f"parameter {scalars[0]} is a single number, which FSDP cannot shard; give it the shape [1]"
            )
        if self._data_mesh().size() == 1 and not self.cpu_offload and self.param_dtype == "fp32":
            # There is nothing to gather, and fully_shard would copy every parameter to do so.
            why = f"nothing is sharded on {say_mesh(self.mesh_sizes())}"
            given = (key for key in OF_FULLY_SHARD if getattr(self._options, key) != getattr(FSDPConfig(), key))
            self.idle = {**self.idle, **{f"distributed.fsdp.{key}": why for key in given}}
            return
        offload = CPUOffloadPolicy(pin_memory=True) if self.cpu_offload else OffloadPolicy()
        param_type, reduce_type = DTYPES[self.param_dtype], DTYPES[self.reduce_dtype]
        # None: all but the model itself, whose parameters its backward would gather again right away.
        freed = None if self.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") else False
        options: dict[str, Any] = {"mesh": self._data_mesh(), "offload_policy": offload, "reshard_after_forward": freed}
        types = MixedPrecisionPolicy(param_type, reduce_type, cast_forward_inputs=False)
        for name in reversed(self.units):  # children before parents
            fully_shard(model.get_submodule(name), mp_policy=types, **options)
        # Only the model's own inputs are cast, and only if autocast does not see to types.
        types = MixedPrecisionPolicy(param_type, reduce_type, cast_forward_inputs=self.precision == "pure_bf16")
        for root in self.roots(model):
            fully_shard(root, mp_policy=types, **options)
        if self.forward_prefetch:
            for root in self.roots(model):
                inside = set(root.modules())
                units = [unit for unit in map(model.get_submodule, self.units) if unit in inside]
                for module, following in pairwise([root, *units]):
                    assert isinstance(module, FSDPModule)
                    module.set_modules_to_forward_prefetch([following])  # type: ignore[list-item]
        for unit in self._fsdp_modules(model):
            unit.register_forward_hook(_free_without_backward)  # type: ignore[attr-defined]

    def roots(self, model: nn.Module) -> list[nn.Module]:
        """What is called as a whole."""
        return [model]

    def _fsdp_modules(self, model: nn.Module) -> list[FSDPModule]:
        modules = {id(module): module for root in (model, *self.roots(model)) for module in root.modules()}
        return [module for module in modules.values() if isinstance(module, FSDPModule)]

    def _reshard(self, model: nn.Module) -> None:
        """A forward that no backward followed leaves units gathered, and their parameters are then not the shards."""
        for unit in self._fsdp_modules(model):
            unit.reshard()

    def _data_mesh(self) -> DeviceMesh:
        assert self.mesh is not None
        replicated = self.mesh["dp_replicate"].size() > 1 or self.sharding_strategy == "NO_SHARD"
        return self.mesh["dp_replicate", "dp_shard"] if replicated else self.mesh["dp_shard"]

    def _cast_buffers(self, model: nn.Module) -> None:
        if self.buffer_dtype:
            move_buffers(model, self.device, DTYPES[self.buffer_dtype])

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        root = uncompiled(model)
        if isinstance(root, FSDPModule):
            root.set_requires_gradient_sync(last or self.reduce_every_micro_batch)
            root.set_requires_all_reduce(last)  # over replicas; shards of the sum can wait for it
        return nullcontext()

    def prepare(self, *args: Any, **options: Any) -> tuple[nn.Module, Optimizer]:
        model, optimizer = super().prepare(*args, **options)
        self._buffers, self._used = MovingBuffers(self.broadcast), None
        hold_shards(optimizer)
        return model, optimizer

    def forward_backward(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], recipe: Objective, step: int
    ) -> StepOutput:
        with self._buffers.equal_at_start(model):
            return super().forward_backward(model, micro_batches, recipe, step)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        hold_shards(optimizer)  # one made by hand holds DTensors until now
        parameters = take_gradients(optimizer)
        every = (p for group in optimizer.param_groups for p in group["params"])
        pattern, first = crc32(bytes(p.grad is None for p in every)), self._used is None
        self._used = pattern
        if first:
            self.check_sync()
        return [p.grad for p in parameters if p.grad is not None]

    def check_sync(self) -> None:
        """fully_shard adds up the gradients that are there by their place in a unit: all ranks must have the same."""
        used, among = self._used or 0, self.data_groups
        if self.highest(used, among) != -self.highest(-used, among):
            raise UserError(
                "ranks used different parameters in the same step, and FSDP would add their gradients to each other; "
                "let every rank use all of them, for instance by adding what is left out times 0"
            )

    def norm(self, optimizer: Optimizer, gradients: list[Tensor]) -> Tensor:
        parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        return self.whole_norm(total_norm((p.grad, split_over(getattr(p, "shard_of", p))) for p in parameters))

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Of the whole model's gradient, given that of what this rank and those it shards with have."""
        return norm

    def zero_gradients(self, optimizer: Optimizer) -> None:
        drop_gradients(p for group in optimizer.param_groups for p in group["params"])

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        self._refuse_loss_scale()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = self.whole_norm(total_norm((local_part(g), split_over(g)) for g in gradients))
        for gradient in gradients:
            local_part(gradient).div_((norm / max_norm).clamp(min=1))
        return norm

    def state(self, model: nn.Module, optimizer: Optimizer) -> TrainState:
        self._reshard(model)
        return super().state(model, optimizer)

    def load_state(self, model: nn.Module, optimizer: Optimizer, state: TrainState) -> None:
        self._reshard(model)
        super().load_state(model, optimizer, state)


def _free_without_backward(module: nn.Module, inputs: Any, output: Any) -> None:
    """What no backward will use need not stay gathered; and the names of parameters would be of the gathered ones."""
    if not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]
