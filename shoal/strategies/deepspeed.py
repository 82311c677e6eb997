"""ZeRO by DeepSpeed: a rank keeps its part of the optimizer (1), of the gradients too (2), of the weights too (3)."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from math import ceil, prod
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shoal.config.deepspeed_json import fit_json, idle_keys, read_json
from shoal.config.schema import TrainingConfig
from shoal.config.schema_distributed import DeepSpeedConfig
from shoal.errors import UserError
from shoal.parallel.zero.limits import LookedAt, check_counts, check_optimizer, check_parameters
from shoal.parallel.zero.nvme import SwapFolder, load_operator
from shoal.parallel.zero.partition import (
    Connection,
    Partition,
    cut_into_rows,
    exchange,
    load_deepspeed,
    partition_each,
    row_stretches,
)
from shoal.processes.world import World
from shoal.strategies.base import DistributedStrategy, Objective
from shoal.strategies.buffers import MovingBuffers
from shoal.tensors import local_slices, logical_shape, named_tensors
from shoal.torch_private import as_rows
from shoal.types import NO_PLAN, MicroBatch, ParallelPlan, StepInfo, StepOutput, TrainState, Weights
from shoal.weights.by_name import DRAWN, materialise

CPU = torch.device("cpu")


class DeepSpeedStrategy(DistributedStrategy):
    """DeepSpeed's engine over all ranks. Losses, clipping, schedules and checkpoints are shoal's.

    `config` is a DeepSpeed JSON, as a path or as a dict, in place of the other options.
    """

    name = "deepspeed"
    needs_mesh = True
    backs_plainly = False

    def __init__(
        self,
        *,
        stage: int | None = None,
        offload_optimizer: str = "none",
        offload_parameters: str = "none",
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        training: TrainingConfig | None = None,
        **options: Any,
    ):
        """`training` is the run that a `config` has to agree with."""
        given = {key: options.pop(key) for key in DeepSpeedConfig.model_fields.keys() & options.keys()}
        given |= {"offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
        self.zero = _check(stage, given)
        without_use = {key: why for key, why in idle_keys(self.zero.stage).items() if _is_given(self.zero, key)}
        self.idle: dict[str, str] = {f"distributed.deepspeed.{key}": why for key, why in without_use.items()}
        if config is not None:
            self.zero = self._fit(config, training, options.get("mixed_precision", "fp32"))
        super().__init__(**options)
        self.stage = self.zero.stage
        self._check_options()
        if self.device.type == "cpu":
            for key in ("overlap_comm", "cpu_checkpointing"):
                if getattr(self.zero, key):
                    self.idle[f"distributed.deepspeed.{key}"] = "the run is on the CPU"
        self._deepspeed = load_deepspeed(self.device)
        self._connection = Connection(self._deepspeed, self.device, self.world.local_size)
        self._buffers = MovingBuffers(self.broadcast)
        self._partition: Partition | None = None
        self._folders: dict[str, SwapFolder] = {}
        self._trained: frozenset[str] = frozenset()
        self._waiting: set[str] = set()
        """Those of them that have no gradient yet from the micro-batch that is under way."""
        self._looks_on = False

    def _fit(
        self, config: str | os.PathLike[str] | Mapping[str, Any], training: TrainingConfig | None, precision: str
    ) -> DeepSpeedConfig:
        if self.zero != DeepSpeedConfig():
            raise UserError("DeepSpeedStrategy(config=…) says what the other options would; leave those out")
        in_python = isinstance(config, Mapping)
        told = dict(config) if isinstance(config, Mapping) else read_json(config)
        where = "DeepSpeedStrategy(config=…)" if in_python else f"distributed.deepspeed.config_file {config}"
        fitted = fit_json(told, training, World.from_environment().size, where, precision)
        self.idle = fitted.idle
        return DeepSpeedConfig(**fitted.options)

    def _check_options(self) -> None:
        if self.device.type not in ("cpu", "cuda"):
            raise UserError(
                f"distributed.strategy = deepspeed runs on cuda and cpu, not on {self.device.type}; use single"
            )
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise UserError(
                f"training.mixed_precision = {self.precision} is not for strategy deepspeed; use bf16, or strategy fsdp"
            )
        if self.zero.cpu_checkpointing and self.activation_checkpointing.mode == "none":
            raise UserError(
                "distributed.deepspeed.cpu_checkpointing = true, but training.activation_checkpointing = none, so that "
                "nothing is recomputed; use full"
            )
        if self.zero.cpu_checkpointing and self.compile:
            raise UserError(
                "distributed.deepspeed.cpu_checkpointing = true cannot look into compiled blocks; set training.compile "
                "to false"
            )

    def mesh_sizes(self) -> dict[str, int]:
        return {"dp_shard" if self.zero.stage == 3 else "dp_replicate": self.world.size}

    def about(self) -> str:
        split = {1: "optimizer", 2: "optimizer and gradients", 3: "optimizer, gradients and weights"}[self.stage]
        ranks = f"over {self.world.size} ranks" if self.world.size > 1 else "on one rank, so whole"
        host = {"optimizer": self.zero.offload_optimizer, "weights": self.zero.offload_parameters}
        places = {"cpu": "the host's memory"}
        there = [f", {what} in {places.get(place, place)}" for what, place in host.items() if place != "none"]
        return f"deepspeed ZeRO-{self.stage}, {split} {ranks}{''.join(there)}"

    def setup(self) -> None:
        super().setup()
        self._connection.open()

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        if error is not None and self.world.size > 1:  # nothing that peers take part in
            self._remove_folders()
            self._connection.close()
        super().__exit__(error, *rest)

    def teardown(self) -> None:
        self._end_engine()
        self._connection.close()
        super().teardown()

    def _end_engine(self) -> None:
        if self._partition is not None:
            self._partition = None
            self.engine.destroy()  # type: ignore[operator]
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in self._folders.values():
            folder.remove()
        self._folders = {}

    # The loop's verbs

    def prepare(
        self,
        model: nn.Module,
        build_optimizer: Callable[[nn.Module], Optimizer],
        plan: ParallelPlan = NO_PLAN,
        weights: Weights = DRAWN,
    ) -> tuple[nn.Module, Optimizer]:
        """The optimizer is built while parameters have their shapes; it comes back with this rank's part of them."""
        self._end_engine()
        check_parameters(model)
        self._transform(model, plan)
        self._cast_inside(model)
        if self.stage == 3:
            cut_into_rows(model, self._rows_mesh())
        # A model that was built is whole on the CPU; its parameters go to the device one by one.
        one_by_one = self.stage == 3 and weights.kind == "built"
        materialise(model, self.device, self.seed, weights, parameters_on=CPU if one_by_one else None)
        for parameter in model.parameters():
            if not parameter.is_contiguous():  # DeepSpeed sends them as rows of bytes
                parameter.data = parameter.data.contiguous()
        optimizer = build_optimizer(model)
        check_optimizer(optimizer)
        self._open_folders(model, optimizer)
        config = self.engine_config(model)
        if self.stage == 3:
            partition_each(self._deepspeed, config, model, optimizer)
        self.engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self._partition = Partition(self.engine, _names(model))
        self._buffers, self._looks_on = MovingBuffers(self.broadcast), self.stage == 3
        self._watch_gradients(model)
        return model, optimizer

    def _transform(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        plan = super()._transform(model, plan)
        if self.zero.cpu_checkpointing:
            for name in self.checkpointed_modules:
                _keep_inputs_on_host(model.get_submodule(name), pin_memory=self.device.type == "cuda")
        return plan

    def engine_config(self, model: nn.Module) -> dict[str, Any]:
        """What DeepSpeed is told. Its batch size, accumulation, clipping and types are not used: shoal sees to them."""
        zero = self.zero.model_dump(
            exclude={"zero_stage", "offload_optimizer", "offload_parameters", "aio", "cpu_checkpointing", "config_file"}
        )
        zero = {key: value for key, value in zero.items() if key not in idle_keys(self.stage)}
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        zero["reduce_bucket_size"] = self.zero.reduce_bucket_size or max(25 * 2**20 // 4, trained // 20)
        if self.device.type == "cpu":
            zero["overlap_comm"] = False  # there is nothing to overlap with
        zero["offload_optimizer"] = self._offload("offload_optimizer")
        zero["offload_param"] = self._offload("offload_parameters") | _swap_buffers(model, self.world.size)
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "gradient_allreduce_op": "mean" if self.stage == 3 else "sum",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.stage, **zero},
            "aio": self.zero.aio.model_dump(),
        }

    def _open_folders(self, model: nn.Module, optimizer: Optimizer) -> None:
        """For what is to be on a disk; and the operator that reads and writes it."""
        numels = {p: prod(logical_shape(p)) for p in model.parameters()}
        trained = sum(numel for p, numel in numels.items() if p.requires_grad)
        slots = int(bool(optimizer.defaults["momentum"])) if isinstance(optimizer, torch.optim.SGD) else 2
        elements = {"offload_optimizer": trained * (2 + slots), "offload_parameters": sum(numels.values())}
        for key, count in elements.items():
            place, told = getattr(self.zero, key), f"distributed.deepspeed.{key}"
            if place not in ("none", "cpu"):
                here = count * 4 * self.world.local_size // self.world.size
                self._folders[key] = SwapFolder(place, told, here)
                load_operator(speaks=self.world.rank == 0 and len(self._folders) == 1, key=told)

    def _offload(self, key: str) -> dict[str, Any]:
        if key in self._folders:
            return {"device": "nvme", "nvme_path": str(self._folders[key].path)}
        return {"device": getattr(self.zero, key), "pin_memory": self.device.type == "cuda"}

    def _cast_inside(self, model: nn.Module) -> None:
        """The engine turns autocast off around the model; inside of it, it is turned on again."""
        if self.precision == "fp32":
            return
        inner = model.forward

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                return inner(*args, **kwargs)

        model.forward = forward

    def forward_backward(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], recipe: Objective, step: int
    ) -> StepOutput:
        if self._looks_on:
            recipe, self._looks_on = LookedAt(recipe, model), False
        with self._buffers.equal_at_start(model):
            return super().forward_backward(model, micro_batches, recipe, step)

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self.engine.set_gradient_accumulation_boundary(last)  # type: ignore[operator]
        return nullcontext()

    def back(self, loss: Tensor, scale: Tensor) -> None:
        self._waiting = {*self._trained}
        self.engine.backward(loss * scale, scale_wrt_gas=False)  # type: ignore[operator]
        if self._waiting:
            raise UserError(
                f"{min(self._waiting)} took no part in the loss of a micro-batch on rank {self.world.rank}; DeepSpeed "
                "would step it all the same, by an old gradient or by weight decay alone: freeze or remove it, or use "
                "strategy ddp with find_unused_parameters"
            )

    def _watch_gradients(self, model: nn.Module) -> None:
        trained = {name: p for p, name in _names(model).items() if p.requires_grad}
        self._trained = frozenset(trained)
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._waiting.discard(name))

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> StepInfo:
        """DeepSpeed decides on the host: it waits for the norm, and skips an update whose norm is not finite."""
        scale = self.loss_scale.scale.item() if self.loss_scale else 1.0
        norm, skipped = self._parts.step(max_norm, scale / self._averaged_over)
        told = [torch.as_tensor(value, dtype=torch.float32, device=self.device) for value in (norm, skipped)]
        info = StepInfo(*told)
        if self.loss_scale:
            self.loss_scale.update(info.skipped)
        return info

    def named_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Whole ones, put together from all ranks."""
        whole, times = self._deepspeed.utils.safe_get_full_grad, self._averaged_over
        return {name: whole(p).detach() * times for p, name in _names(model).items() if p.requires_grad}

    @property
    def _averaged_over(self) -> int:
        """Stage 3 averages gradients over ranks and cannot do otherwise; that is undone when they are unscaled."""
        return self.data_size if self.stage == 3 else 1

    def parameter_bytes(self, model: nn.Module) -> int:
        return self._parts.parameter_bytes(model)

    def state(self, model: nn.Module, optimizer: Optimizer) -> TrainState:
        """Weights that every rank has, as they are; all else in rows, made of flat stretches one tensor at a time.

        All ranks call it together. Rows are exchanged through the host's memory and stay there; where a part already
        is rows, and in memory, it is not copied.
        """
        self.sync_buffers(model)
        parts, moments = self._parts, dict[str, dict[str, Tensor]]()
        tensors = named_tensors(model)
        for group, members in parts.members.items():
            with parts.at_hand(group):
                for name, parameter in members.items():
                    if self.stage == 3:
                        tensors[name] = self._rows(name, parameter, parts.weights(name, parameter))
                    if slots := parts.slots(name):
                        moments[name] = {s: self._rows(name, parameter, t) if t.ndim else t for s, t in slots.items()}
        return TrainState(tensors, moments, self.loss_scale.state() if self.loss_scale else {})

    @torch.no_grad()
    def load_state(self, model: nn.Module, optimizer: Optimizer, state: TrainState) -> None:
        """The inverse, one tensor at a time. Weights that are not in the state stay as they are."""
        parts = self._parts
        elsewhere = {name for members in parts.members.values() for name in members if self.stage == 3}
        for name, tensor in named_tensors(model).items():
            if name in state.model and name not in elsewhere:
                tensor.copy_(_whole(state.model[name]))
        parts.forget_slots()
        for group, members in parts.members.items():
            if group is not None:
                check_counts(members, state)
            with parts.to_change(group):
                for name, parameter in members.items():
                    if name in elsewhere & state.model.keys():
                        parts.put_weights(name, parameter, self._own_elements(name, parameter, state.model[name]))
                    if group is not None:
                        self._load_slots(name, parameter, state.optimizer.get(name, {}))
        parts.settle()
        own = self.loss_scale.state() if self.loss_scale else {}
        for key in own.keys() & state.strategy.keys():
            own[key].copy_(_whole(state.strategy[key]))

    def _load_slots(self, name: str, parameter: Tensor, slots: Mapping[str, Any]) -> None:
        for slot, value in slots.items():
            if slot != "step" and tuple(value.shape) == logical_shape(parameter):
                self._parts.new_slot(name, slot).copy_(self._own_elements(name, parameter, value))
            elif (kept := self._parts.set_number(name, slot, _whole(value)).item()) != _whole(value).item():
                raise UserError(
                    f"the {slot} of {name} is {_whole(value).item():g}, but {kept:g} of parameters beside it, and "
                    "DeepSpeed keeps one for all of them; go on with another distributed.strategy"
                )

    # Between them

    @property
    def _parts(self) -> Partition:
        if self._partition is None:
            raise UserError("DeepSpeedStrategy: call prepare(model, build_optimizer, plan) first")
        return self._partition

    def _rows_mesh(self) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh["dp_shard" if self.stage == 3 else "dp_replicate"]

    def _rows(self, name: str, parameter: Tensor, own: Tensor) -> Tensor:
        """From this rank's stretch of a tensor that is as large as the parameter, its rows."""
        shape, before = logical_shape(parameter), self._parts.stretches[name]
        rows = exchange(own, before, row_stretches(shape, self.world.size))
        if rows is own and self._parts.on_disk(self._parts.group.get(name)):
            rows = own.clone()  # whose memory is about to be another group's
        count = len(rows) // max(1, prod(shape[1:]))
        return as_rows(rows.view(count, *shape[1:]), shape, self._rows_mesh())

    def _own_elements(self, name: str, parameter: Tensor, value: Any) -> Tensor:
        """This rank's stretch of a tensor that everyone has, or that is on disk, or in rows."""
        shape, parts = logical_shape(parameter), self._parts
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            own = parts.own[name]
            return _whole(value).flatten()[own.start :][: own.numel]
        if isinstance(value, DTensor):
            rows = value.redistribute(self._rows_mesh(), [Shard(0)]).to_local()
        else:
            places = local_slices(as_rows(torch.empty(0), shape, self._rows_mesh()))
            rows = value.read([place.start for place in places], [place.stop - place.start for place in places])
        return exchange(rows.flatten(), row_stretches(shape, self.world.size), parts.stretches[name])

    # The small verbs

    def wrap_model(self, model: nn.Module) -> nn.Module:
        raise UserError(
            "wrap_model: DeepSpeed takes model and optimizer together; use model, optimizer = "
            "strategy.prepare(model, build_optimizer, plan), and strategy.engine in the forward"
        )

    def backward(self, loss: Tensor) -> None:
        scale = self.loss_scale.scale if self.loss_scale else torch.ones((), device=self.device)
        self.back(loss, scale / self.data_size)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        raise UserError("clip_grad_norm: DeepSpeed clips while it steps; use strategy.step(optimizer, max_norm)")


def _check(stage: int | None, options: dict[str, Any]) -> DeepSpeedConfig:
    try:
        zero = DeepSpeedConfig(zero_stage=stage, **options)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]).removeprefix("zero_") if first["loc"] else ""
        where = f"DeepSpeedStrategy({key}={first['input']!r}): " if key else ""
        raise UserError(f"{where}{first['msg'].removeprefix('Value error, ')}") from None
    if (why := zero.why_not_offload()) is not None:
        raise UserError(f"DeepSpeedStrategy: {why.replace('zero_stage: ', 'stage=')}")
    return zero


def _swap_buffers(model: nn.Module, ranks: int) -> dict[str, int]:
    """Memory between a disk and weights: as many buffers as one module has weights, and some to read ahead."""
    shapes = [[p.numel() for p in module.parameters(recurse=False)] for module in model.modules()]
    largest = max((numel for numels in shapes for numel in numels), default=1)
    return {"buffer_count": max(map(len, shapes)) + 4, "buffer_size": ceil(largest / ranks), "max_in_cpu": 0}


def _is_given(zero: DeepSpeedConfig, key: str) -> bool:
    return bool(getattr(zero, key) != DeepSpeedConfig.model_fields[key].default)


def _keep_inputs_on_host(module: nn.Module, pin_memory: bool) -> None:
    """What a recomputed block saves is what goes into it."""
    recomputed = module.forward

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            return recomputed(*args, **kwargs)

    module.forward = types.MethodType(forward, module)


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _whole(value: Any) -> Tensor:
    tensor: Tensor = value if isinstance(value, Tensor) else value.read()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
