"""The interface of strategies that the training loop calls, and the code that all of them share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from shoal.checkpoint.regions import Held
from shoal.config.layout import Layout
from shoal.config.mesh import DIMENSIONS, coordinates, data_rank, data_size
from shoal.errors import UserError
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.parallel.compression.local_sgd import LocalSGD
from shoal.parallel.pipeline.stages import count_stages, stages_of
from shoal.parallel.tensor.sequence_parallel import check_length
from shoal.parallel.tensor.tensor_parallel import TensorParallel
from shoal.processes.desync import check_replicas
from shoal.processes.group import choose_backend, cpu_group, join, leave
from shoal.processes.roll_call import RollCall
from shoal.processes.world import World
from shoal.seeding import SampleRng, mix, seed_generators
from shoal.strategies.engines.plain import PlainEngine, Reduction
from shoal.strategies.executors import InTurn, Overlapped
from shoal.strategies.local_weights import LocalWeights
from shoal.strategies.measures import Measures
from shoal.strategies.module_state import ModuleState
from shoal.strategies.own_time import OwnTime
from shoal.strategies.recorded import Recorded
from shoal.strategies.update import Update, check_separate
from shoal.tensors import is_on_host, map_tensors
from shoal.torch_private import set_group_timeout
from shoal.transform.activation_checkpointing import apply_activation_checkpointing
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.compile import CompiledModules, GraphChoice
from shoal.transform.host_inputs import HostInputs, keep_inputs_on_host
from shoal.transform.loss_scale import LossScale
from shoal.transform.precision import autocast, check_precision
from shoal.types import NO_PLAN, MicroBatch, Objective, ParallelPlan, StepInfo, StepOutput, TrainState, Weights

DRAWN = Weights("init")
Builder = Callable[[nn.Module], Optimizer]
"""Builds an optimizer of a model that has been split and has its weights."""


@dataclass
class Engaged:
    """What a strategy has put in force on a model: the report shows it, and the prover counts it."""

    description: str = ""
    """The layout in words."""
    parameter_bytes: int = 0
    """The memory that this rank uses for weights."""
    checkpointed_modules: list[str] = field(default_factory=list)
    host_inputs: HostInputs | None = None
    compiled: CompiledModules | None = None
    float8_layers: int = 0
    fused_modules: list[str] = field(default_factory=list)
    chunked_head: ChunkedHead | None = None
    exchange: CompressedExchange | LocalSGD | None = None
    """What replicas exchange instead of gradients as they are, if they do."""
    recorded: Recorded | None = None
    """What runs micro-batches from recordings in CUDA graphs."""
    own_time: OwnTime | None = None
    """Measures what this rank computes in a step without waiting for others."""
    restarted: str = ""
    """The parts of the state loaded last that did not fit this rank and start anew, in words."""
    not_in_force: dict[str, str] = field(default_factory=dict)
    """The keys that were set and have no effect, each with the reason."""


class DistributedStrategy(ABC):
    """Where a run is computed: one layout, on the processes of one world.

    Gradients have one meaning: the gradient of (sum of losses) / (count) over the global batch. `prepare` returns the
    plain model, with the names it had; the engine that computes it stays in here.
    """

    mesh: DeviceMesh | None = None
    """The processes, arranged as the layout says; None for a single process that needs no process group."""
    engaged: Engaged

    def __init__(
        self,
        layout: Layout,
        world: World,
        *,
        device: str = "auto",
        seed: int = 0,
        backend: str = "auto",
        timeout: float = 1800,
    ):
        self.layout, self.world, self.name = layout, world, layout.strategy
        self.rank, self.world_size, self.is_main_process = world.rank, world.size, world.rank == 0
        place = coordinates(world.rank, layout.mesh)
        self.data_rank, self.data_size = data_rank(place, layout.mesh), data_size(layout.mesh)
        self.is_data_leader = not any(place[side] for side in ("pp", "cp", "tp"))
        """True for the first of the ranks that work on the same samples."""
        pp, last_stage = layout.mesh["pp"], count_stages(layout.mesh["pp"], layout.schedule) - 1
        self.reports_metrics = place["tp"] == 0 and last_stage in stages_of(place["pp"], pp, layout.schedule)
        """True for the ranks whose metrics add up to those of the global batch: of a tensor-parallel group the first,
        of a pipeline those with the last stage."""
        self.device = find_device(device, world.local_rank)
        check_precision(layout.precision, layout.tf32, self.device)
        if layout.strategy in ("fsdp", "mesh", "deepspeed") and self.device.type not in ("cpu", "cuda"):
            raise UserError(
                f"distributed.strategy = {self.name} runs on cuda and cpu, not on {self.device.type}; use single"
            )
        self._coordinates, self._seed = place, seed
        # Stages have other layers and context-parallel ranks other tokens, so they draw other random numbers; the first
        # of them draws what a single device draws.
        apart = (place["pp"], place["cp"]) if place["pp"] or place["cp"] else ()
        self._rng_key = (self.data_rank, *apart)
        self._backend, self._timeout_seconds = choose_backend(backend, self.device, world), timeout
        self._data_groups: Sequence[dist.ProcessGroup | None] = (None,) if self.data_size > 1 else ()
        """A sum over these, one after another, is the sum over all slices of a batch; None means all ranks."""
        self._settings_before = ExitStack()
        self._roll_call: RollCall | None = None
        """Finds ranks that do not come to what all ranks have to call; None for one process."""
        self._engine: PlainEngine | None = None
        """What computes the model, once there is one."""
        self._executor: InTurn | Overlapped
        self._updates: dict[Optimizer, Update] = {}
        self._held: dict[str, Held] = {}
        self._loss_scale: LossScale | None = None
        self._module_state: ModuleState
        self._step = 0
        """The step that is being computed, counted from 0."""

    @staticmethod
    def from_config(config: Any) -> DistributedStrategy:
        """Returns the strategy that a config names: a file, a dict of sections, or a checked `Config`.

        Of its sections `experiment`, `training` and `distributed` are used, and a recipe is not needed.
        """
        from shoal.strategies.presets import from_any_config  # which needs this class

        return from_any_config(config)

    # Beginning and end

    def setup(self) -> None:
        """Joins the other processes and applies the settings that hold for the whole process."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        restore = self._settings_before.callback
        if self.layout.tf32:
            restore(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        if self.layout.deterministic:
            if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
                restore(os.environ.pop, "CUBLAS_WORKSPACE_CONFIG", None)
                os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is only then repeatable
            restore(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True)
            restore(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = False
        if self.world.size > 1 or self.layout.strategy in ("fsdp", "mesh", "deepspeed"):
            join(self.world, self.device, self._backend, self._timeout_seconds)
            self.mesh = self._build_mesh(self.layout.mesh)
        if self.world.size > 1 and self.world.group != "imagined":
            self._roll_call = RollCall(self._timeout_seconds)

    def _build_mesh(self, sides: Mapping[str, int]) -> DeviceMesh:
        mesh = init_device_mesh(self.device.type, tuple(sides[name] for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)
        if self.world.group != "imagined":
            for group in mesh.get_all_groups():
                set_group_timeout(group, self._timeout_seconds)
        return mesh

    def teardown(self) -> None:
        """Leaves the other processes and restores the settings that `setup` found."""
        if self._roll_call is not None:
            self._roll_call.leave()
            self._roll_call = None
        leave(self.world)
        self._settings_before.close()

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        if error is None or self.world.size == 1:  # after an error the peers may be stuck, and so would leaving be
            self.teardown()

    # The verbs of the training loop

    @property
    def engine(self) -> nn.Module:
        """The module that computes a forward which a backward follows."""
        assert self._engine is not None
        return self._engine.module

    def prepare(
        self,
        model: nn.Module,
        build_optimizer: Builder,
        plan: ParallelPlan = NO_PLAN,
        weights: Weights = DRAWN,
        memory: AbstractContextManager[Any] | None = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Splits the model as the layout says, sets its weights, and builds the optimizer of what this rank holds.

        `memory` is entered where memory is first needed: a planner passes FakeTensorMode.
        """
        (optimizer,) = self._place_model(model, [build_optimizer], plan, weights, "sum", memory)
        return model, optimizer

    def prepare_several(
        self,
        model: nn.Module,
        builders: Sequence[Builder],
        plan: ParallelPlan = NO_PLAN,
        weights: Weights = DRAWN,
    ) -> list[Optimizer]:
        """As `prepare`, with an optimizer for each of several objectives; each has parameters of its own."""
        return self._place_model(model, builders, plan, weights, "sum")

    @abstractmethod
    def _place_model(
        self,
        model: nn.Module,
        builders: Sequence[Builder],
        plan: ParallelPlan,
        weights: Weights,
        reduction: Reduction,
        memory: AbstractContextManager[Any] | None = None,
    ) -> list[Optimizer]:
        """Does the work of `prepare` for any number of optimizers; `reduction` says how ranks combine gradients."""

    @abstractmethod
    def _update_for(self, optimizer: Optimizer, model: nn.Module) -> Update:
        """Returns the Update of an optimizer; the model has been prepared before."""

    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Sequence[MicroBatch],
        recipe: Objective,
        step: int,
        trained: Collection[str] | None = None,
    ) -> StepOutput:
        """Computes the gradient of (sum of losses) / (count) over the global batch, and returns both sums.

        `trained` are the names of the parameters that get a gradient; by default all do.
        """
        assert self._engine is not None
        own_time = self._engine.own_time
        self._start_step()
        if own_time.is_on:
            own_time.begin(step)
        batches = self._prepare_batches(micro_batches, recipe)
        counts = [recipe.count(batch) for batch in batches]
        own_count = self._sum(counts, micro_batches)
        if own_time.is_on:
            own_time.stop()
        # Under local_sgd every rank trains alone, on its slice of the batch.
        is_alone, self._step = self.layout.local_sgd is not None, step
        count = own_count if is_alone else self.sum_over_data(own_count)
        per_count = _per_count(count, self._loss_scale)
        scales = [per_count if micro.weight == 1 else per_count * micro.weight for micro in micro_batches]
        measures = Measures(recipe, micro_batches, counts)
        if trained is not None and isinstance(self._executor, InTurn):
            self._executor.warm_up(batches[0], recipe, measures, step)
        if trained is None:
            losses = self._executor.forward_backward(batches, scales, recipe, measures, step)
        else:
            with self._training_alone(model, trained):
                losses = self._executor.forward_backward(batches, scales, recipe, measures, step)
        if own_time.is_on:
            own_time.end()
        own_total = self._sum(losses, micro_batches)
        return StepOutput(own_total if is_alone else self.sum_over_data(own_total), count, measures.by_name)

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> StepInfo:
        """Clips the gradient to `max_norm`, updates, and clears it; an update that is not finite is skipped."""
        info = self._updates[optimizer].step(max_norm)
        if self._loss_scale:
            self._loss_scale.update(info.skipped)
        return info

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], recipe: Objective, *, over_ranks: bool = True
    ) -> StepOutput:
        """Returns the summed loss and count of these micro-batches without gradients, over all ranks or of this one."""
        batches = self._prepare_batches(micro_batches, recipe)
        counts = [recipe.count(batch) for batch in batches]
        measures = Measures(recipe, micro_batches, counts, only_loss=not over_ranks)
        total = self._sum(self._executor.score(model, batches, recipe, measures), micro_batches)
        count = self._sum(counts, micro_batches)
        if not over_ranks:
            return StepOutput(total, count)
        return StepOutput(self.sum_over_data(total), self.sum_over_data(count), measures.by_name)

    @abstractmethod
    def state(self, model: nn.Module, optimizer: Optimizer) -> TrainState:
        """Returns weights, buffers and optimizer state by name, each as this rank holds it. All ranks call it."""

    @abstractmethod
    def load_state(self, model: nn.Module, optimizer: Optimizer | None, state: TrainState) -> None:
        """Takes this rank's part of a state that was saved in any layout. Weights that it lacks stay as they are."""

    # Checkpoints by hand. Here and not only in `Loop`, because this is where people look for them.

    def save_checkpoint(
        self, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, **state: Any
    ) -> None:
        """Writes the folder `path`, as `Loop.save` does; `state`, such as step and epoch, is anything JSON can hold."""
        from shoal.strategies.saving import save  # which needs this class

        save(self, Path(path), model, self._joined(optimizer, model), state)

    def load_checkpoint(
        self, path: str | os.PathLike[str], model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint of any layout, and returns the `state` that it was saved with.

        Without an optimizer the weights alone are loaded, as for inference; the model may then be a plain one that the
        strategy has not prepared. Without a model nothing is loaded, and what is returned also has all tensors, on the
        CPU: `model` by name, and `optimizer` by parameter and slot.
        """
        from shoal.strategies.saving import find_placed, load, load_plain, read

        if model is None:
            return read(Path(path))
        if optimizer is None and find_placed(self, model) is None:
            return load_plain(Path(path), model)
        return load(self, Path(path), model, self._joined(optimizer, model) if optimizer else [], optimizer is None)

    def _joined(self, optimizer: Optimizer, model: nn.Module) -> list[Optimizer]:
        """Returns the optimizer, after one that was built by hand has joined those that this strategy steps."""
        from shoal.strategies.saving import placed_model

        if optimizer not in self._updates:
            plain = placed_model(self, model)
            check_separate([*self._updates, optimizer], plain)
            self._updates[optimizer] = self._update_for(optimizer, plain)
        return [optimizer]

    def held(self) -> Mapping[str, Held]:
        """Returns every tensor of the model with the part that this rank holds, as `state` would give it.

        It is computed once, at the end of `prepare`, and moves no data.
        """
        return self._held

    def local_weights(self, model: nn.Module) -> LocalWeights:
        """Returns this rank's part of the trained parameters, for averages that are sharded as they are."""
        return LocalWeights(model)

    @abstractmethod
    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the gradients after a backward, by name; whole, or laid out as their parameters are."""

    @contextmanager
    def whole_model(self, model: nn.Module) -> Iterator[nn.Module | None]:
        """Yields a model that may be called in any way, such as to generate; None if no rank has all of its layers."""
        with autocast(self.layout.precision, self.device), self.device:
            yield model

    def average(self, model: nn.Module) -> AbstractContextManager[None]:
        """Puts the average over replicas into the model, if they differ, as they do within a round of local_sgd.

        Leaving the context gives this rank its own weights back; a call without `with` leaves the average.
        """
        return nullcontext()

    def sync_buffers(self, model: nn.Module) -> None:
        """Makes buffers and extra state equal to those of the first data-parallel rank, as before every step."""
        self._module_state.make_equal()

    def check_sync(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises Desync if `tensors`, such as the parameters, differ between replicas, naming the first that does."""
        if self.mesh is not None and self.layout.mesh["dp_replicate"] > 1 and tensors:
            check_replicas(tensors, self.mesh.get_group("dp_replicate"))

    # Collectives

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Returns the sum over data-parallel ranks, and over context-parallel ones, which have other tokens."""
        if not self._data_groups:
            return tensor
        tensor = tensor.clone()
        for group in self._data_groups:
            dist.all_reduce(tensor, group=group)
        return tensor

    def max_over_ranks(self, number: int) -> int:
        """Returns the highest number that any rank has. Sent as a CPU tensor, so that no device is waited for."""
        return number if self.world.size == 1 else self._max(number, (None,))

    def any_rank(self, condition: bool) -> bool:
        """Returns whether the condition holds on any rank."""
        return bool(self.max_over_ranks(int(condition)))

    def barrier(self) -> None:
        """Waits until all ranks have come here."""
        if self.world.size > 1:
            dist.barrier()

    # Shared by the strategies

    def _max(self, number: int, groups: Sequence[dist.ProcessGroup | None]) -> int:
        highest = torch.tensor(number)
        for group in groups:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=cpu_group(group))
        return int(highest)

    def _start_step(self) -> None:
        """Lets all data-parallel ranks start with the same buffers."""
        if self.layout.engine == "ddp" and not self.layout.ddp.broadcast_buffers:
            self._module_state.check()
        else:
            self._module_state.make_equal()

    @contextmanager
    def _training_alone(self, model: nn.Module, trained: Collection[str]) -> Iterator[None]:
        """Is entered around forwards and backwards that give a gradient to some parameters only."""
        others = [p for name, p in model.named_parameters() if name not in trained and p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def _find_module_state(self, model: nn.Module) -> ModuleState:
        return ModuleState(model, () if self.world.group == "imagined" else self._data_groups)

    def _prepare_batches(self, micro_batches: Sequence[MicroBatch], recipe: Objective) -> list[Any]:
        """Returns the micro-batches as the model sees them: of every sequence, the part that this rank computes."""
        if self.engaged.compiled:
            self.engaged.compiled.choice.sizes_vary = recipe.sizes_vary
        batches = [prepare_batch(micro, recipe, self._seed, self.device) for micro in micro_batches]
        if self.layout.mesh["cp"] == 1 and not self.layout.sequence_parallel:
            return batches
        # If there is one part, it is the whole sequence with its positions.
        parts = [recipe.split_sequence(batch, self._coordinates["cp"], self.layout.mesh["cp"]) for batch in batches]
        for batch in parts if self.layout.sequence_parallel else ():
            check_length(recipe.sequence_length(batch), self.layout.mesh["tp"])
        return parts

    def _sum(self, values: Sequence[Tensor | int], micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Adds up the values of the micro-batches that are not fillers."""
        like = values[0]
        if len(values) == 1 and micro_batches[0].weight and isinstance(like, Tensor):
            return like  # the usual case, without the calls below
        counted = [value for value, micro in zip(values, micro_batches, strict=True) if micro.weight]
        first, *others = counted or [torch.zeros_like(like) if isinstance(like, Tensor) else 0]
        total = sum(others, start=first)
        return total if isinstance(total, Tensor) else torch.full((), total, device=self.device)

    def _transform(self, model: nn.Module, plan: ParallelPlan, tensor: TensorParallel | None = None) -> None:
        """Makes the head compute the loss, blocks recompute their activations, and compiles them."""
        layout, engaged = self.layout, self.engaged
        choice = GraphChoice() if layout.compile else None
        # The head computes the loss in chunks, or where ranks share the vocabulary and so the loss.
        shares_vocabulary = tensor is not None and plan.head is not None and plan.tensor.get(plan.head) == "vocabulary"
        in_other_stage = layout.mesh["pp"] > 1 and plan.head is None
        if (shares_vocabulary or layout.loss_chunks > 1) and not in_other_stage:
            shared = tensor if shares_vocabulary else None
            engaged.chunked_head = ChunkedHead(model, plan, layout.loss_chunks, choice, shared, layout.fp8_head)
        recompute = layout.activation_checkpointing
        if layout.compile:
            engaged.compiled = CompiledModules(model, plan, choice)
        names = engaged.checkpointed_modules = apply_activation_checkpointing(model, plan, recompute)
        if engaged.compiled:
            engaged.compiled.compile(self.device)
        blocks = [model.get_submodule(name) for name in names]
        if engaged.compiled and recompute.offload:  # nothing could move what is inside of a graph
            engaged.compiled.check_around(blocks, "training.activation_checkpointing.offload = true")
        if recompute.offload and self.device.type == "cpu":
            engaged.not_in_force["training.activation_checkpointing.offload"] = "the run is on the CPU"
        elif recompute.offload:
            engaged.host_inputs = keep_inputs_on_host(blocks, self.device)

    def _own_state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint holds besides the model's tensors: the loss scale, and modules' extra state."""
        return {**self._scale_state(), **self._module_state.extra_state()}

    def _scale_state(self) -> dict[str, Tensor]:
        return self._loss_scale.state() if self._loss_scale else {}


def _per_count(count: Tensor, loss_scale: LossScale | None) -> Tensor:
    """Returns what a summed loss is multiplied by: 1 / count, and 0 if the count is 0.

    It is NaN for a negative count, so that the update is skipped and the skip is counted. It is computed on the device,
    so that the host does not wait for the count; one that is on the host takes one operation instead of four.
    """
    if is_on_host(count):
        number = count.item()
        inverse = 1 / number if number > 0 else nan if number else 0.0
        dtype = count.dtype if count.is_floating_point() else torch.get_default_dtype()
        scale = torch.full_like(count, inverse, dtype=dtype)
    else:
        scale = _inverse_on_device(count)
    return scale if loss_scale is None else scale * loss_scale.scale


def _inverse_on_device(count: Tensor) -> Tensor:
    return torch.where(count > 0, count.reciprocal(), count.sqrt())  # the root is 0 for 0, and else NaN


def prepare_batch(micro: MicroBatch, recipe: Objective, seed: int, device: torch.device) -> Any:
    """Returns a micro-batch as the model sees it: on the device, with what the recipe draws for each sample.

    A recipe should draw from the SampleRng alone; if it uses global generators, it at least repeats itself.
    """
    batch = to_device(micro.data, device)
    if not recipe.prepares_batches:
        return batch
    seed_generators(mix(seed, "prepare_batch", *micro.epochs[:1], *micro.ids[:1]), device)
    return recipe.prepare_batch(batch, SampleRng(seed, micro.epochs, micro.ids, device))


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves the tensors of a batch, however nested, to the device."""
    return map_tensors(partial(Tensor.to, device=device, non_blocking=True), batch)


def find_device(name: str, local_rank: int) -> torch.device:
    """Returns the device of this process. Ranks of one machine take its GPUs in turn."""
    available = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        name = available.type if available else "cpu"
    elif name != "cpu" and (available is None or available.type != name):
        seen = available.type if available else "only the CPU"
        raise UserError(f"training.device = {name!r}, but torch sees {seen}; use auto or {available or 'cpu'}")
    if name == "cpu":
        return torch.device("cpu")
    return torch.device(name, local_rank % torch.accelerator.device_count())
