"""The strategy of everything except DeepSpeed: DDP, FSDP2, and tensor, context and pipeline parallelism on one mesh.

`_place_model` lists what is done to a model, in the order in which it has to be done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoal.checkpoint.regions import Held, held_of
from shoal.config.mesh import say_mesh
from shoal.errors import UserError
from shoal.parallel.batch_norm import SyncedBatchNorms
from shoal.parallel.context.ulysses import HeadExchange, apply_context_parallel
from shoal.parallel.pipeline.pipeline import Pipeline
from shoal.parallel.pipeline.stages import count_stages, cut, stages_of, take_stages
from shoal.parallel.sharding.units import WrapPolicy, check_shardable, check_units, choose_units
from shoal.parallel.tensor.layers import check_world_sizes
from shoal.parallel.tensor.tensor_parallel import TensorParallel
from shoal.quantised.layers import check_gathered
from shoal.strategies.contract import Builder, DistributedStrategy, Engaged
from shoal.strategies.engines.all_reduce import AllReduceEngine
from shoal.strategies.engines.compressed import CompressedEngine
from shoal.strategies.engines.ddp import DDPEngine
from shoal.strategies.engines.fsdp import FSDPEngine
from shoal.strategies.engines.local import LocalEngine
from shoal.strategies.engines.plain import PlainEngine, Reduction
from shoal.strategies.executors import InTurn, Overlapped, Surroundings
from shoal.strategies.module_state import check_storable
from shoal.strategies.own_time import innermost
from shoal.strategies.recorded import Recorded
from shoal.strategies.state import collect_state, restore_state
from shoal.strategies.update import ShardedUpdate, Update, check_optimizer
from shoal.tensors import DTYPES, local_part, named_tensors
from shoal.transform.chunked_loss import check_head
from shoal.transform.float8 import apply_float8
from shoal.transform.kernels import apply_kernels
from shoal.transform.loss_scale import LossScale
from shoal.transform.precision import compute_dtype
from shoal.types import ParallelPlan, StepInfo, TrainState, Weights
from shoal.weights.materialise import cast_weights, materialise, move_buffers
from shoal.weights.parameter_extras import (
    ParameterAttributes,
    check_alike_on_ranks,
    check_replaceable,
    make_contiguous,
)

PURE_BF16 = "training.mixed_precision = pure_bf16"
ENGINES: Mapping[str, type[PlainEngine]] = {"plain": PlainEngine, "ddp": DDPEngine, "fully_shard": FSDPEngine}


class NativeStrategy(DistributedStrategy):
    """Computes with torch's own parts: DDP or fully_shard, tensor, sequence, context and pipeline parallelism."""

    _engine: PlainEngine
    _exchange: HeadExchange | None = None
    _pipeline: Pipeline | None = None
    _wrap_policy: WrapPolicy | None = None
    """A policy of torch's first FSDP that chooses the units, in the place of `distributed.fsdp.auto_wrap_policy`."""
    _weights_mesh: DeviceMesh | None = None
    """The mesh that parameters are laid out on. Context-parallel ranks add up gradients as data-parallel ones do, so
    their side is folded into dp_shard."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.layout.fsdp.cpu_offload and self.layout.is_sharded_family and self.device.type == "cpu":
            raise UserError(
                "distributed.fsdp.cpu_offload = true needs a GPU to offload from, but the run is on the CPU; leave it "
                "out"
            )

    def setup(self) -> None:
        super().setup()
        sides, self._weights_mesh = self.layout.mesh, self.mesh
        if self.layout.strategy != "mesh":
            return
        if sides["cp"] > 1:
            self._weights_mesh = self._build_mesh({**sides, "dp_shard": sides["dp_shard"] * sides["cp"], "cp": 1})
        assert self._weights_mesh is not None
        longer = [name for name in ("dp_shard", "dp_replicate") if self._weights_mesh[name].size() > 1]
        self._data_groups = [self._weights_mesh.get_group(name) for name in longer]

    def _place_model(
        self,
        model: nn.Module,
        builders: Sequence[Builder],
        plan: ParallelPlan,
        weights: Weights,
        reduction: Reduction,
        memory: AbstractContextManager[Any] | None = None,
    ) -> list[Optimizer]:
        layout, sides = self.layout, self.layout.mesh
        self.engaged = engaged = Engaged(not_in_force=dict(layout.not_in_force))
        roots, entry = [model], plan.entry
        # Structure, on the meta device. Refusals look at the whole model, so that all ranks give the same answer.
        if layout.weights_dtype == "bf16":
            cast_weights(model, torch.bfloat16)
        check_storable(model)
        check_world_sizes(model, sides["tp"])
        attributes = ParameterAttributes(model)
        if self.data_size > 1:
            check_alike_on_ranks(model)
        kind = PlainEngine if reduction == "none" else ENGINES[layout.engine]
        if kind is DDPEngine and reduction == "sum":
            kind, why = self._exchanging_engine(len(builders))
            idle = layout.ddp.model_dump(exclude_defaults=True, exclude={"broadcast_buffers"}) if why else {}
            engaged.not_in_force |= {f"distributed.ddp.{key}": why for key in idle}
        fsdp = layout.fsdp
        wrapped = fsdp.auto_wrap_policy, fsdp.min_num_params, fsdp.wrap_classes, self._wrap_policy
        if layout.is_sharded_family:
            check_shardable(model)
        if kind is FSDPEngine or sides["tp"] > 1:
            check_replaceable(model, layout.strategy)
            make_contiguous(model)
        if kind is FSDPEngine:
            check_units(model, choose_units(model, plan, *wrapped), layout.strategy)
            if fsdp.param_dtype or layout.precision == "pure_bf16":
                key = f"distributed.fsdp.param_dtype = {fsdp.param_dtype}" if fsdp.param_dtype else PURE_BF16
                check_gathered(model, DTYPES[layout.param_dtype], key)
        if layout.precision == "fp8":
            engaged.float8_layers = apply_float8(model, plan, sides["tp"])
        engaged.fused_modules = apply_kernels(model, layout.kernels, self.device, compute_dtype(layout.precision))
        if sides["pp"] > 1:
            check_head(plan, layout.loss_chunks)
            roots, plan = self._take_stages(model, plan)
        tensor = self._apply_tensor_parallel(model, plan) if sides["tp"] > 1 else None
        self._exchange = apply_context_parallel(model, self._group("cp")) if sides["cp"] > 1 else None
        synced = layout.sync_batch_norm and self._data_groups
        batch_norms = SyncedBatchNorms(model, self._data_groups) if synced else None
        self._transform(model, plan, tensor)  # the head that computes the loss, activation checkpointing, compile
        self._engine = engine = kind(layout, self.device, self._weights_mesh, reduction)
        if kind is FSDPEngine and reduction == "sum" and len(builders) > 1:
            engine.is_warm = False
        units = choose_units(model, plan, *wrapped) if layout.is_sharded_family else []
        if layout.is_sharded_family:
            engine.shard(model, roots, units)
        if engine.waits_in == "forward" or sides["pp"] > 1:
            engine.own_time.watch(innermost([*roots, *map(model.get_submodule, units)]))
        # Memory, from here on.
        with memory or nullcontext():
            offload = engine.parameter_device if engine.parameter_device != self.device else None
            # Weights in bf16 are those of fp32, rounded once.
            drawn_as = {torch.bfloat16: torch.float32} if layout.weights_dtype == "bf16" else {}
            materialise(model, self.device, self._seed, weights, offload, drawn_as)
            attributes.restore(model)
            if layout.is_sharded_family and layout.fsdp.buffer_dtype:
                move_buffers(model, self.device, DTYPES[layout.fsdp.buffer_dtype])
            engine.wrap(model)
            surroundings = Surroundings(
                self.device, layout.precision, self._seed, self._rng_key, engaged.chunked_head, batch_norms
            )
            self._executor = InTurn(engine, surroundings)
            if layout.cuda_graphs and self.device.type == "cuda":
                self._executor = engaged.recorded = Recorded(engine, surroundings, model)
            elif layout.cuda_graphs:
                engaged.not_in_force["training.cuda_graphs"] = f"the run is on {self.device.type}"
            if sides["pp"] > 1:
                self._pipeline = Pipeline(roots, layout.schedule, self._group("pp"), self.device, entry)
                self._executor = Overlapped(self._pipeline, surroundings)
            self._loss_scale = LossScale(engine.parameter_device) if layout.precision == "fp16" else None
            engaged.exchange = engine.compressed or engine.local_sgd
            if engine.compressed is not None:
                engine.compressed.loss_scale = self._current_loss_scale if self._loss_scale else None
            optimizers = [build(model) for build in builders]
            self._updates = {optimizer: self._update_for(optimizer, model) for optimizer in optimizers}
        self._module_state = self._find_module_state(model)
        self._held = self._find_held(model)
        engaged.own_time = engine.own_time
        engaged.description = self._describe(tensor)
        engaged.parameter_bytes = sum(local_part(parameter).nbytes for parameter in model.parameters())
        return optimizers

    def _exchanging_engine(self, num_optimizers: int) -> tuple[type[PlainEngine], str]:
        """Returns the engine of `ddp`, and why options of DistributedDataParallel have no effect, if they have none."""
        if self.layout.local_sgd is not None:
            return LocalEngine, "local_sgd exchanges weights"
        if self.layout.compression.method != "none":
            return CompressedEngine, "compressed gradients are exchanged after the backward"
        if num_optimizers > 1:
            return AllReduceEngine, "with several objectives gradients are summed after the backward"
        return DDPEngine, ""

    def _group(self, side: str) -> dist.ProcessGroup:
        assert self.mesh is not None
        return self.mesh.get_group(side)

    def _take_stages(self, model: nn.Module, plan: ParallelPlan) -> tuple[list[nn.Module], ParallelPlan]:
        """Leaves this rank's stages in the model; returns them, and the plan of what is left."""
        pp, schedule = self.layout.mesh["pp"], self.layout.schedule
        cuts = cut(model, plan, count_stages(pp, schedule))
        mine = stages_of(self._coordinates["pp"], pp, schedule)
        roots = take_stages(model, plan, cuts, mine)
        kept = {name for stage in mine for name in cuts[stage]}
        embed, head = (name if name in kept else None for name in (plan.embed, plan.head))
        return roots, replace(plan, blocks=tuple(name for name in plan.blocks if name in kept), embed=embed, head=head)

    def _apply_tensor_parallel(self, model: nn.Module, plan: ParallelPlan) -> TensorParallel:
        assert self._weights_mesh is not None
        tensor = TensorParallel(self._weights_mesh["tp"], self.layout.sequence_parallel)
        tensor.apply(model, plan)
        return tensor

    def _update_for(self, optimizer: Optimizer, model: nn.Module) -> Update:
        engine = self._engine
        engine.reshard()  # after a forward without a backward the model has gathered parameters
        check_optimizer(optimizer, model)
        if self.layout.weights_dtype == "bf16" and not getattr(optimizer, "rounds_stochastically", False):
            raise UserError(
                f"training.weights_dtype = bf16: {type(optimizer).__name__} rounds to the nearest number, which drops "
                "small updates; let the config build its adamw, or use weights_dtype: fp32"
            )
        if not self.layout.is_sharded_family:
            average_over = self._data_groups if engine.reduction == "none" else ()
            return Update(optimizer, self._loss_scale, engine.keeps_gradients, average_over)
        stages = self._pipeline.group if self._pipeline else None
        max_over_data = partial(self._max, groups=self._data_groups)
        return ShardedUpdate(optimizer, self._loss_scale, max_over_data, stages, engine.parameter_device)

    def _find_held(self, model: nn.Module) -> dict[str, Held]:
        held = held_of(named_tensors(model))
        pipeline = self._pipeline
        if pipeline is None or self.world.group == "imagined":  # where there are no object collectives
            return held
        by_stage: list[dict[str, Held]] = [{} for _ in range(pipeline.size)]
        dist.all_gather_object(by_stage, held, group=pipeline.group)
        return {name: replace(one, region=None) for stage in by_stage for name, one in stage.items()} | held

    def _describe(self, tensor: TensorParallel | None) -> str:
        layout = self.layout
        if layout.strategy == "mesh":
            words = [f"mesh, {say_mesh(layout.mesh)}"]
            if self._pipeline is not None:
                words.append(f"{self._pipeline.num_stages} stages, {layout.schedule}")
            if tensor is not None:
                sequence = ", tokens between them too" if layout.sequence_parallel else ""
                words.append(f"{len(tensor.split_parameters)} parameters split by tp{sequence}")
            return "; ".join(words)
        if layout.strategy == "fsdp" and layout.engine == "plain":
            return f"fsdp {layout.fsdp.sharding_strategy}, one process and so nothing to shard"
        return self._engine.describe()

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def state(self, model: nn.Module, optimizer: Optimizer) -> TrainState:
        self._engine.check_frozen()
        self._engine.reshard()
        self.sync_buffers(model)
        state = collect_state(model, optimizer, self._own_state())
        return self._engine.local_sgd.as_stored(state) if self._engine.local_sgd else state

    def _current_loss_scale(self) -> Tensor:
        assert self._loss_scale is not None
        return self._loss_scale.scale

    def _own_state(self) -> dict[str, Tensor]:
        own, pipeline = {**super()._own_state(), **self._engine.rank_state()}, self._pipeline
        if pipeline is None:
            return own
        # All stages have the extra state of all, so that a save does not change its kinds on some ranks alone.
        by_stage: list[dict[str, Tensor]] = [{} for _ in range(pipeline.size)]
        dist.all_gather_object(by_stage, self._module_state.extra_state(), group=pipeline.group)
        return own | {name: tensor for stage in by_stage for name, tensor in stage.items()}

    def load_state(self, model: nn.Module, optimizer: Optimizer | None, state: TrainState) -> None:
        self._engine.reshard()
        local_sgd, restarted = self._engine.local_sgd, ""
        if local_sgd is not None:
            state, restarted = local_sgd.own_state(state)
        restore_state(model, optimizer, self._scale_state(), state)
        self._module_state.set_extra_state(state.strategy)
        if local_sgd is not None:
            local_sgd.load_state(state.strategy, is_own=not restarted)
        self.engaged.restarted = restarted or self._engine.load_rank_state(state.strategy)

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> StepInfo:
        info, local_sgd = super().step(optimizer, max_norm), self._engine.local_sgd
        if local_sgd is not None:
            local_sgd.after_step(self._step)
        return info

    def average(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._engine.local_sgd.average() if self._engine.local_sgd else nullcontext()

    def check_sync(self, tensors: Mapping[str, Tensor]) -> None:
        local_sgd = getattr(self._engine, "local_sgd", None)  # before `prepare` there is no engine
        super().check_sync(local_sgd.replicated() if local_sgd else tensors)
        for update in self._updates.values():
            update.check_used()

    @contextmanager
    def whole_model(self, model: nn.Module) -> Iterator[nn.Module | None]:
        if self._pipeline is not None:
            yield None
            return
        exchange = self._exchange
        if exchange is not None:
            exchange.paused = True  # all ranks have all tokens for once
        try:
            with super().whole_model(model) as whole:
                yield whole
        finally:
            if exchange is not None:
                exchange.paused = False
