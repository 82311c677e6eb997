"""ZeRO by DeepSpeed: a rank keeps its part of the optimizer (1), of the gradients too (2), of the weights too (3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shoal.checkpoint.regions import Held, Region, whole_region
from shoal.config.deepspeed_keys import idle_keys
from shoal.errors import UserError
from shoal.forward import add_layer
from shoal.parallel.sharding.units import check_shardable
from shoal.parallel.tensor.layers import check_world_sizes
from shoal.parallel.zero.limits import CheckedLoss, check_counts, check_dtypes, check_elementwise
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
from shoal.strategies.contract import Builder, DistributedStrategy, Engaged
from shoal.strategies.engines.plain import PlainEngine, Reduction
from shoal.strategies.executors import InTurn, Surroundings
from shoal.strategies.local_weights import LocalWeights
from shoal.strategies.module_state import check_storable
from shoal.strategies.state import restore_scale
from shoal.strategies.update import Update, check_optimizer
from shoal.strategies.zero_weights import ZeroWeights
from shoal.tensors import logical_shape, named_tensors, tensors_with_names
from shoal.torch_private import as_rows, keep_hooks_out_of_graphs, shape_and_offset
from shoal.transform.kernels import apply_kernels
from shoal.transform.loss_scale import LossScale
from shoal.transform.precision import autocast, compute_dtype
from shoal.types import MicroBatch, Objective, ParallelPlan, StepInfo, StepOutput, TrainState, Weights
from shoal.weights.materialise import materialise
from shoal.weights.parameter_extras import (
    ParameterAttributes,
    check_alike_on_ranks,
    check_replaceable,
    make_contiguous,
)

CPU = torch.device("cpu")


class ZeroEngine(PlainEngine):
    """DeepSpeed's engine, with a check that every trained parameter gets a gradient."""

    waits_in = "forward"
    has_gradients = False
    """True from a backward to the step that uses its gradients."""

    def connect(self, engine: Any, model: nn.Module, rank: int, factor: float) -> None:
        """`factor` turns a sum over ranks into a mean, for a Loop."""
        self.module, self._rank, self._factor = engine, rank, factor
        self.backward = self._backward
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._trained, self._waiting = frozenset(trained), set[str]()
        """All trained parameters, and those without a gradient from the micro-batch under way."""
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._waiting.discard(name))

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        self.module.set_gradient_accumulation_boundary(last)  # type: ignore[operator]
        return nullcontext()

    def _backward(self, loss: Tensor, scale: Tensor) -> None:
        self._waiting, self.has_gradients = {*self._trained}, True
        self.module.backward(loss * (scale * self._factor), scale_wrt_gas=False)  # type: ignore[operator]
        if self._waiting:
            raise UserError(
                f"{min(self._waiting)} took no part in the loss of a micro-batch on rank {self._rank}; DeepSpeed would "
                "update it all the same, by an old gradient or by weight decay alone: freeze or remove it, or use "
                "strategy ddp with find_unused_parameters"
            )


class ZeroUpdate(Update):
    """Lets DeepSpeed step. It decides on the host: it waits for the norm, and skips an update that is not finite."""

    steps_otherwise = True

    def __init__(
        self,
        optimizer: Optimizer,
        loss_scale: LossScale | None,
        engine: ZeroEngine,
        partition: Partition,
        averaged_over: int,
    ):
        """Stage 3 averages gradients over ranks and cannot do otherwise; unscaling them takes that back."""
        super().__init__(optimizer, loss_scale)
        self._engine, self._partition, self._averaged_over = engine, partition, averaged_over

    def step(self, max_norm: float | None = None, max_value: float | None = None) -> StepInfo:
        if max_value:
            raise UserError("clip(max_value=...): DeepSpeed clips by the norm alone; use max_norm, or strategy fsdp")
        scale = self.loss_scale.scale.item() if self.loss_scale else 1.0
        self._stepping = True
        norm, skipped = self._partition.step(max_norm, scale / self._averaged_over)
        self._stepping = self._engine.has_gradients = False
        as_tensor = partial(torch.as_tensor, dtype=torch.float32, device=self._engine.device)
        return StepInfo(as_tensor(norm), as_tensor(skipped))

    def zero_grad(self) -> None:
        """DeepSpeed clears gradients when it steps, and never else."""
        if self._engine.has_gradients:
            raise UserError("zero_grad(): DeepSpeed keeps the gradients of a backward until it steps; call step first")

    def _before_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if not self._stepping:
            raise UserError(
                "optimizer.step() does not reach the gradients, which DeepSpeed holds; use step(optimizer, max_norm) "
                "of the strategy or loop"
            )


class ZeroStrategy(DistributedStrategy):
    """Computes with DeepSpeed's engine. Losses, clipping, schedules and checkpoints are shoal's."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._zero, self._stage = self.layout.zero, self.layout.zero.stage
        self._deepspeed = load_deepspeed(self.device)
        self._connection = Connection(self._deepspeed, self.device, self.world.local_size)
        self._folders: dict[str, SwapFolder] = {}
        self._told: dict[str, Any] = {}
        """The config that DeepSpeed was given with the model."""
        self._is_first_step = False

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
        if self._engine is not None:
            self._engine.module.destroy()  # type: ignore[operator]
            self._engine = None
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in self._folders.values():
            folder.remove()
        self._folders = {}

    def _place_model(
        self,
        model: nn.Module,
        builders: Sequence[Builder],
        plan: ParallelPlan,
        weights: Weights,
        reduction: Reduction,
        memory: AbstractContextManager[Any] | None = None,
    ) -> list[Optimizer]:
        """The optimizer is built while parameters have their shapes; DeepSpeed then takes both."""
        if len(builders) > 1:
            raise UserError("several optimizers: DeepSpeed's engine takes one; use strategy fsdp or ddp")
        if memory is not None:
            raise UserError("memory: DeepSpeed needs real memory for its partitions; plan with strategy fsdp or ddp")
        layout = self.layout
        self._end_engine()
        self.engaged = engaged = Engaged(not_in_force=self._not_in_force())
        # Structure.
        check_storable(model)
        check_shardable(model)
        check_world_sizes(model, 1)
        check_replaceable(model, layout.strategy)
        attributes = ParameterAttributes(model)
        if self.data_size > 1:
            check_alike_on_ranks(model)
        check_dtypes(model, self._stage)
        engaged.fused_modules = apply_kernels(model, layout.kernels, self.device, compute_dtype(layout.precision))
        self._transform(model, plan)
        if self._zero.cpu_checkpointing:
            for name in engaged.checkpointed_modules:
                # What a recomputed block saves for the backward are its inputs.
                on_host = partial(torch.autograd.graph.save_on_cpu, pin_memory=self.device.type == "cuda")
                add_layer(model.get_submodule(name), partial(_inside, on_host))
        if layout.precision != "fp32":
            # The engine turns autocast off around the model; inside of it, it is turned on again.
            add_layer(model, partial(_inside, partial(autocast, layout.precision, self.device)))
        if self._stage == 3:
            cut_into_rows(model, self._rows_mesh())
        # Memory. A model that was built is whole on the CPU; under stage 3 its parameters go to the device one by one.
        one_by_one = self._stage == 3 and weights.kind == "built"
        materialise(model, self.device, self._seed, weights, CPU if one_by_one else None)
        make_contiguous(model)  # DeepSpeed sends parameters as rows of bytes
        attributes.restore(model)
        optimizer = builders[0](model)
        check_optimizer(optimizer, model)
        check_elementwise(optimizer)
        self._open_folders(model, optimizer)
        self._told = config = self._engine_config(model)
        if self._stage == 3:
            partition_each(self._deepspeed, config, model, optimizer)
        module, *_ = self._deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        if self._stage == 3 and layout.compile:
            keep_hooks_out_of_graphs(model)  # DeepSpeed's, which gather weights
        self._engine = engine = ZeroEngine(layout, self.device, self.mesh, reduction)
        if self._stage < 3:  # stage 3 gathers weights all through the forward
            engine.own_time.watch([model])
        engine.connect(module, model, self.rank, 1 / self.data_size if reduction == "mean" else 1.0)
        self._partition = Partition(module, {parameter: name for name, parameter in model.named_parameters()})
        surroundings = Surroundings(self.device, layout.precision, self._seed, self._rng_key, engaged.chunked_head)
        self._executor = InTurn(engine, surroundings)
        self._loss_scale = LossScale(self.device) if layout.precision == "fp16" else None
        averaged_over = self.data_size if self._stage == 3 else 1
        self._updates = {optimizer: ZeroUpdate(optimizer, self._loss_scale, engine, self._partition, averaged_over)}
        self._module_state, self._is_first_step = self._find_module_state(model), True
        self._held = self._find_held(model)
        engaged.own_time = engine.own_time
        engaged.description = self._describe()
        engaged.parameter_bytes = self._partition.parameter_bytes(model)
        return [optimizer]

    def _update_for(self, optimizer: Optimizer, model: nn.Module) -> Update:
        raise UserError(
            f"this {type(optimizer).__name__} was not built by loop.wrap, and DeepSpeed takes model and optimizer "
            "together; give wrap a function: loop.wrap(model, lambda model: torch.optim.AdamW(model.parameters()))"
        )

    def _not_in_force(self) -> dict[str, str]:
        on_gpus = ("overlap_comm", "cpu_checkpointing") if self.device.type == "cpu" else ()
        idle = {f"distributed.deepspeed.{key}": "the run is on the CPU" for key in on_gpus if getattr(self._zero, key)}
        return {**self.layout.not_in_force, **idle}

    def _describe(self) -> str:
        split = {1: "optimizer", 2: "optimizer and gradients", 3: "optimizer, gradients and weights"}[self._stage]
        ranks = f"over {self.world.size} ranks" if self.world.size > 1 else "on one rank, so whole"
        offloaded = {"optimizer": self._zero.offload_optimizer, "weights": self._zero.offload_parameters}
        names = {"cpu": "the host's memory"}
        places = [f", {part} in {names.get(place, place)}" for part, place in offloaded.items() if place != "none"]
        return f"deepspeed ZeRO-{self._stage}, {split} {ranks}{''.join(places)}"

    def _find_held(self, model: nn.Module) -> dict[str, Held]:
        """Weights that stage 3 partitions are stored as rows; every rank has all other tensors whole."""
        held = {}
        for tensor, names in tensors_with_names(model):
            shape = logical_shape(tensor)
            region = self._rows_region(shape) if hasattr(tensor, "ds_shape") else whole_region(shape)
            held[names[0]] = Held(shape, tensor.dtype, region)
        return held

    @property
    def ds_config(self) -> dict[str, Any]:
        """DeepSpeed's config, in its own words. Sizes that depend on the model are there once it has one."""
        return self._told or self._engine_config(None)

    @property
    def model_engine(self) -> Any:
        """DeepSpeed's engine. It is made when a model is prepared or wrapped."""
        if self._engine is None:
            raise UserError("model_engine: there is none yet; call loop.wrap(model, build_optimizer) first")
        return self.engine

    def _engine_config(self, model: nn.Module | None) -> dict[str, Any]:
        """Returns DeepSpeed's config. Its batch size, accumulation, clipping and types are not used."""
        zero = self._zero.model_dump(
            exclude={"zero_stage", "offload_optimizer", "offload_parameters", "aio", "cpu_checkpointing", "config_file"}
        )
        zero = {key: value for key, value in zero.items() if key not in idle_keys(self._stage)}
        if model is None:
            zero = {key: value for key, value in zero.items() if value is not None}
        elif self._zero.reduce_bucket_size is None:
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            zero["reduce_bucket_size"] = max(25 * 2**20 // 4, trained // 20)
        if self.device.type == "cpu":
            zero["overlap_comm"] = False  # there is nothing to overlap with
        zero["offload_optimizer"] = self._offload("offload_optimizer")
        zero["offload_param"] = self._offload("offload_parameters")
        if model is not None:
            zero["offload_param"] |= _swap_buffers(model, self.world.size)
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "gradient_allreduce_op": "mean" if self._stage == 3 else "sum",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self._stage, **zero},
            "aio": self._zero.aio.model_dump(),
        }

    def _open_folders(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Opens the folders of what is offloaded to a disk, and loads the operator that reads and writes them."""
        numels = {p: prod(logical_shape(p)) for p in model.parameters()}
        trained = sum(numel for p, numel in numels.items() if p.requires_grad)
        slots = int(bool(optimizer.defaults["momentum"])) if isinstance(optimizer, torch.optim.SGD) else 2
        elements = {"offload_optimizer": trained * (2 + slots), "offload_parameters": sum(numels.values())}
        for key, count in elements.items():
            place, full_key = getattr(self._zero, key), f"distributed.deepspeed.{key}"
            if place not in ("none", "cpu"):
                bytes_on_machine = count * 4 * self.world.local_size // self.world.size
                self._folders[key] = SwapFolder(place, full_key, bytes_on_machine)
                load_operator(speaks=self.world.rank == 0 and len(self._folders) == 1, key=full_key)

    def _offload(self, key: str) -> dict[str, Any]:
        if key in self._folders:
            return {"device": "nvme", "nvme_path": str(self._folders[key].path)}
        return {"device": getattr(self._zero, key), "pin_memory": self.device.type == "cuda"}

    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Sequence[MicroBatch],
        recipe: Objective,
        step: int,
        trained: Collection[str] | None = None,
    ) -> StepOutput:
        if trained is not None:
            raise UserError("several objectives: DeepSpeed's engine has one optimizer; use strategy fsdp or ddp")
        if self._is_first_step and self._stage == 3:
            recipe = CheckedLoss(recipe, model)
        self._is_first_step = False
        return super().forward_backward(model, micro_batches, recipe, step)

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Puts whole gradients together from all ranks."""
        whole, factor = self._deepspeed.utils.safe_get_full_grad, self.data_size if self._stage == 3 else 1
        return {name: whole(p).detach() * factor for name, p in model.named_parameters() if p.requires_grad}

    def local_weights(self, model: nn.Module) -> LocalWeights:
        for key in self._folders:
            raise UserError(
                f"distributed.deepspeed.{key} = {getattr(self._zero, key)}: callbacks that average weights, such as "
                "ema, need them in memory; offload to cpu, or leave the callback out"
            )
        return ZeroWeights(model, self._partition, self._rows, self._own_elements)

    def state(self, model: nn.Module, optimizer: Optimizer) -> TrainState:
        """Weights that every rank has are given as they are; all else in rows, made of flat stretches one at a time.

        Rows are exchanged through the host's memory and stay there; a part that already is rows, and in memory, is not
        copied.
        """
        self.sync_buffers(model)
        partition, moments = self._partition, dict[str, dict[str, Tensor]]()
        tensors = named_tensors(model)
        for group, members in partition.members.items():
            with partition.at_hand(group):
                for name, parameter in members.items():
                    if self._stage == 3:
                        tensors[name] = self._rows(name, parameter, partition.weights(name, parameter))
                    if slots := partition.slots(name):
                        moments[name] = {s: self._rows(name, parameter, t) if t.ndim else t for s, t in slots.items()}
        return TrainState(tensors, moments, self._own_state())

    @torch.no_grad()
    def load_state(self, model: nn.Module, optimizer: Optimizer | None, state: TrainState) -> None:
        partition = self._partition
        partitioned = {name for members in partition.members.values() for name in members if self._stage == 3}
        for name, tensor in named_tensors(model).items():
            if name in state.model and name not in partitioned:
                tensor.copy_(_whole(state.model[name]))
        partition.forget_slots()
        for group, members in partition.members.items():
            if group is not None:
                check_counts(members, state)
            with partition.at_hand(group, write=True):
                for name, parameter in members.items():
                    if name in partitioned & state.model.keys():
                        partition.put_weights(name, parameter, self._own_elements(name, parameter, state.model[name]))
                    if group is not None:
                        self._load_slots(name, parameter, state.optimizer.get(name, {}))
        partition.settle()
        restore_scale(self._scale_state(), state)
        self._module_state.set_extra_state(state.strategy)

    def _load_slots(self, name: str, parameter: Tensor, slots: Mapping[str, Any]) -> None:
        for slot, value in slots.items():
            if slot != "step" and tuple(value.shape) == logical_shape(parameter):
                self._partition.new_slot(name, slot).copy_(self._own_elements(name, parameter, value))
            elif (kept := self._partition.set_number(name, slot, _whole(value)).item()) != _whole(value).item():
                raise UserError(
                    f"the {slot} of {name} is {_whole(value).item():g}, but {kept:g} of parameters beside it, and "
                    "DeepSpeed keeps one for all of them; resume with another distributed.strategy"
                )

    def _rows_mesh(self) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh["dp_shard" if self._stage == 3 else "dp_replicate"]

    def _rows_region(self, shape: tuple[int, ...]) -> Region:
        """Returns which rows of a tensor this rank has in a checkpoint."""
        rows, offset = shape_and_offset(as_rows(torch.empty(0), shape, self._rows_mesh()))
        return Region(offset, rows)

    def _rows(self, name: str, parameter: Tensor, elements: Tensor) -> Tensor:
        """Makes this rank's rows of a tensor as large as the parameter, of the flat elements that ranks have of it."""
        shape, partition = logical_shape(parameter), self._partition
        rows = exchange(elements, partition.stretches[name], row_stretches(shape, self.world.size))
        if rows is elements and partition.on_disk(partition.group.get(name)):
            rows = elements.clone()  # whose memory is about to be another group's
        count = len(rows) // max(1, prod(shape[1:]))
        return as_rows(rows.view(count, *shape[1:]), shape, self._rows_mesh())

    def _own_elements(self, name: str, parameter: Tensor, value: Any) -> Tensor:
        """Returns this rank's flat elements of a tensor that is whole, on disk, or in rows."""
        shape, partition = logical_shape(parameter), self._partition
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            own = partition.own[name]
            return value.flatten()[own.start :][: own.numel]
        if isinstance(value, DTensor):
            rows = value.redistribute(self._rows_mesh(), [Shard(0)]).to_local()
        else:
            rows = value.read(self._rows_region(shape))
        return exchange(rows.flatten(), row_stretches(shape, self.world.size), partition.stretches[name])


def _swap_buffers(model: nn.Module, ranks: int) -> dict[str, int]:
    """Returns the memory between a disk and weights: a buffer for each weight of one module, and some to read ahead."""
    sizes = [[p.numel() for p in module.parameters(recurse=False)] for module in model.modules()]
    largest = max((numel for numels in sizes for numel in numels), default=1)
    return {"buffer_count": max(map(len, sizes)) + 4, "buffer_size": ceil(largest / ranks), "max_in_cpu": 0}


def _inside(
    context: Callable[[], AbstractContextManager[Any]], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A layer that enters a context around the forward."""
    with context():
        return forward(*args, **kwargs)


def _whole(value: Any) -> Tensor:
    tensor: Tensor = value if isinstance(value, Tensor) else value.read()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
