"""Where a run is computed: the contract the loop is written against, on one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from shoal.config.schema import Config
from shoal.errors import UserError
from shoal.parallel.compile import apply_compile
from shoal.parallel.precision import autocast, check_precision
from shoal.parallel.weights import materialise
from shoal.seeding import SampleRng, mix
from shoal.strategies.state import collect_state, restore_state
from shoal.types import MicroBatch, ParallelPlan, StepInfo, StepOutput, TrainState


class Objective(Protocol):
    """What a strategy needs of a recipe."""

    def prepare(self, batch: Any, rng: SampleRng) -> Any: ...
    def inputs(self, batch: Any) -> dict[str, Any]: ...
    def count(self, batch: Any) -> Tensor | int: ...
    def loss(self, output: Any, batch: Any) -> Tensor: ...


class SingleStrategy:
    """One process, one device."""

    name = "single"
    rank = local_rank = data_rank = 0
    world_size = data_size = 1
    is_main_process = True

    def __init__(
        self,
        device: str = "auto",
        mixed_precision: str = "fp32",
        tf32: bool = False,
        compile: bool = False,
        seed: int = 0,
        deterministic: bool = False,
    ):
        self.device = find_device(device)
        self.precision, self.compile, self.seed = mixed_precision, compile, seed
        self.compiled_modules = 0
        self._tf32, self._deterministic = tf32, deterministic
        check_precision(mixed_precision, tf32, self.device)

    def setup(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._tf32:
            torch.set_float32_matmul_precision("high")
        if self._deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is only then repeatable
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False

    def teardown(self) -> None:
        if self._deterministic:
            torch.use_deterministic_algorithms(False)
        if self._tf32:
            torch.set_float32_matmul_precision("highest")

    def __enter__(self) -> SingleStrategy:
        self.setup()
        return self

    def __exit__(self, *exc: object) -> None:
        self.teardown()

    def prepare(
        self, model: nn.Module, build_optimizer: Callable[[nn.Module], Optimizer], plan: ParallelPlan
    ) -> tuple[nn.Module, Optimizer]:
        materialise(model, self.device, self.seed)
        if self.compile:
            self.compiled_modules = apply_compile(model, plan)
        return model, build_optimizer(model)

    def forward_backward(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], recipe: Objective, step: int
    ) -> StepOutput:
        """Gradients of (sum of losses over the global batch) / (count over the global batch)."""
        batches = [self.ready(micro, recipe) for micro in micro_batches]
        count = self._sum([recipe.count(batch) for batch in batches], micro_batches)
        scale = count.clamp(min=1).reciprocal()
        losses = []
        for index, (batch, micro) in enumerate(zip(batches, micro_batches, strict=True)):
            self._seed_generators(step, index)
            with self.autocast():
                loss = recipe.loss(model(**recipe.inputs(batch)), batch)
            loss.backward(scale * micro.weight)  # as if the loss were multiplied by it, for fewer operations
            losses.append(loss.detach().float())
        return StepOutput(self._sum(losses, micro_batches), count)

    def step(self, optimizer: Optimizer, max_norm: float | None) -> StepInfo:
        """Clips and updates; an update whose gradient is not finite is skipped on the device, unseen by the host.

        Fused optimizers do both inside their one kernel, through the two tensors that torch's GradScaler also sets.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        skipped = (norm - norm).ne_(0)  # 1 where the norm is infinite or NaN, whose difference to itself is NaN
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.grad_scale = (norm / max_norm).clamp_(min=1) if max_norm else None  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        return StepInfo(norm, skipped)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, micro_batches: Sequence[MicroBatch], recipe: Objective) -> StepOutput:
        batches = [self.ready(micro, recipe) for micro in micro_batches]
        losses = []
        for index, batch in enumerate(batches):
            self._seed_generators("eval", index)
            with self.autocast():
                losses.append(recipe.loss(model(**recipe.inputs(batch)), batch).float())
        counts = [recipe.count(batch) for batch in batches]
        return StepOutput(self._sum(losses, micro_batches), self._sum(counts, micro_batches))

    def state(self, model: nn.Module, optimizer: Optimizer) -> TrainState:
        return collect_state(model, optimizer)

    def load_state(self, model: nn.Module, optimizer: Optimizer, state: TrainState) -> None:
        restore_state(model, optimizer, state)

    def autocast(self) -> AbstractContextManager[None]:
        return autocast(self.precision, self.device)

    def to_device(self, batch: Any) -> Any:
        """Moves the tensors in dicts, lists, tuples and named tuples, however nested."""
        if isinstance(batch, Tensor):
            return batch.to(self.device, non_blocking=True)
        if isinstance(batch, dict):
            return type(batch)((key, self.to_device(value)) for key, value in batch.items())
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(self.to_device(value) for value in batch))
        if isinstance(batch, list | tuple):
            return type(batch)(self.to_device(value) for value in batch)
        return batch

    def ready(self, micro: MicroBatch, recipe: Objective) -> Any:
        """A micro-batch as the model sees it: on the device, with what the recipe draws for each sample."""
        return recipe.prepare(self.to_device(micro.data), SampleRng(self.seed, micro.epochs, micro.ids, self.device))

    def _seed_generators(self, *place: int | str) -> None:
        """Seeds what a model draws from by its place in the run.

        Not by `torch.manual_seed`: it also remembers the seed for every kind of device that was never used, each with
        a traceback, which takes longer than many a step.
        """
        seed = mix(self.seed, *place, self.data_rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def _sum(self, values: Sequence[Tensor | int], micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Over the micro-batches that are not fillers."""
        counted = [value for value, micro in zip(values, micro_batches, strict=True) if micro.weight]
        first, *others = counted or [0 * values[0]]
        total = sum(others, start=first)
        return total if isinstance(total, Tensor) else torch.full((), total, device=self.device)


def from_config(config: Config) -> SingleStrategy:
    """The strategy a config names. `auto` is `single` for one process."""
    training, experiment = config.training, config.experiment
    return SingleStrategy(
        device=training.device,
        mixed_precision=training.mixed_precision,
        tf32=training.tf32,
        compile=training.compile,
        seed=experiment.seed,
        deterministic=experiment.deterministic,
    )


def find_device(wanted: str) -> torch.device:
    available = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "auto":
        wanted = available.type if available else "cpu"
    elif wanted != "cpu" and (available is None or available.type != wanted):
        there = available.type if available else "only the CPU"
        raise UserError(f"training.device = {wanted!r}, but torch sees {there}; use auto or {available or 'cpu'}")
    return torch.device(wanted) if wanted == "cpu" else torch.device(wanted, 0)
