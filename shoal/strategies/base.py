"""The contract between the loop and the place a run is computed, and all of it that layouts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from shoal.checkpoint import DamagedCheckpoint, open_checkpoint, write_checkpoint
from shoal.checkpoint.latest import check_same_model
from shoal.checkpoint.manifest import MANIFEST, tied_and_buffers
from shoal.config.schema import CheckpointingConfig
from shoal.errors import UserError
from shoal.seeding import SampleRng, mix
from shoal.strategies.ranks import Ranks
from shoal.strategies.state import (
    check_jsonable,
    check_same_optimizer,
    collect_state,
    optimizer_settings,
    restore_settings,
    restore_state,
)
from shoal.tensors import local_part
from shoal.torch_private import uncompiled
from shoal.transform.activation_checkpointing import apply_activation_checkpointing
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.compile import apply_compile
from shoal.transform.float8 import apply_float8
from shoal.transform.loss_scale import LossScale
from shoal.transform.precision import autocast, check_precision
from shoal.types import NO_PLAN, MicroBatch, ParallelPlan, StepInfo, StepOutput, TrainState, Weights
from shoal.weights.by_name import DRAWN, materialise


class Objective(Protocol):
    """What a strategy needs of a recipe."""

    def prepare(self, batch: Any, rng: SampleRng) -> Any: ...
    def inputs(self, batch: Any) -> dict[str, Any]: ...
    def count(self, batch: Any) -> Tensor | int: ...
    def loss(self, output: Any, batch: Any) -> Tensor: ...
    def split_sequence(self, batch: Any, index: int, parts: int) -> Any: ...


class DistributedStrategy(Ranks):
    """One layout of a run. A subclass says how long the sides of its mesh are and how it wraps a model."""

    name: ClassVar[str]
    engine: nn.Module
    keeps_gradients = False
    """Whether gradients live in buffers of the engine's and are zeroed instead of freed."""
    backs_plainly = True
    """Whether a loss of the plain model may be backed through as in plain torch."""

    @property
    def calls_plainly(self) -> bool:
        """Whether a rank can call the model by itself."""
        return True

    stage: int = 0
    """Of ZeRO; 0 where something else says what is split."""
    idle: Mapping[str, str] = MappingProxyType({})
    """Keys of its own that have no effect, and why; for the report."""

    def __init__(
        self,
        *,
        device: str = "auto",
        mixed_precision: str = "fp32",
        tf32: bool = False,
        compile: bool = False,
        activation_checkpointing: CheckpointingConfig | str = "none",
        loss_chunks: int = 1,
        seed: int = 0,
        deterministic: bool = False,
        backend: str = "auto",
        timeout: float = 1800,
    ):
        super().__init__(device, backend, timeout, tf32, deterministic)
        self.precision, self.compile, self.seed = mixed_precision, compile, seed
        if isinstance(activation_checkpointing, str):
            activation_checkpointing = CheckpointingConfig(mode=activation_checkpointing)  # type: ignore[arg-type]
        self.activation_checkpointing, self.loss_chunks = activation_checkpointing, loss_chunks
        self.compiled_modules = self.float8_layers = 0
        self.checkpointed_modules: list[str] = []
        self.chunked_head: ChunkedHead | None = None
        check_precision(mixed_precision, tf32, self.device)
        if mixed_precision == "pure_bf16" and self.name in ("single", "ddp"):
            raise UserError(
                f"training.mixed_precision = pure_bf16 needs someone to keep fp32 weights beside, and {self.name} does "
                "not; use distributed.strategy: fsdp (on one process too; NO_SHARD is ddp's layout), or bf16"
            )
        self.loss_scale = LossScale(self.device) if mixed_precision == "fp16" else None

    def about(self) -> str:
        """The layout in words, for the report."""
        return self.name

    def layout(self) -> dict[str, Any]:
        """The same as data, for the manifest of a checkpoint."""
        mesh = {side: size for side, size in self.mesh_sizes().items() if size > 1}
        stage = {"zero_stage": self.stage} if self.stage else {}
        sizes = {"world_size": self.world_size, "data_size": self.data_size}
        return {"strategy": self.name, **sizes, "mesh": mesh, **stage}

    # The loop's verbs

    def prepare(
        self,
        model: nn.Module,
        build_optimizer: Callable[[nn.Module], Optimizer],
        plan: ParallelPlan = NO_PLAN,
        weights: Weights = DRAWN,
    ) -> tuple[nn.Module, Optimizer]:
        """Gives the model its weights and its place. What comes back has the names of the plain model.

        The engine that computes it in this layout, such as DDP's wrapper, stays in here.
        """
        plan = self._transform(model, plan)
        self.engine = self.place(model, plan, weights)
        return model, build_optimizer(model)

    def _transform(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """What is done to a model before it is spread, in the order in which it has to be; and the plan of the rest."""
        if self.precision == "fp8":
            self.float8_layers = apply_float8(model, plan)
        plan = self.divide(model, plan)
        self.chunked_head = self.chunk_head(model, plan)
        self.checkpointed_modules = apply_activation_checkpointing(model, plan, self.activation_checkpointing)
        if self.compile:
            self.compiled_modules = apply_compile(model, plan)
        return plan

    def divide(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Takes away what other ranks compute, where a layout divides the model itself; the plan of what is left."""
        return plan

    def chunk_head(self, model: nn.Module, plan: ParallelPlan) -> ChunkedHead | None:
        if self.loss_chunks == 1:
            return None
        return ChunkedHead(model, plan, self.loss_chunks, compiled=self.compile)

    def place(self, model: nn.Module, plan: ParallelPlan, weights: Weights) -> nn.Module:
        """The engine: the model spread as this layout has it, with its weights."""
        materialise(model, self.device, self.seed, weights)
        return self.wrap(model, plan)

    def wrap(self, model: nn.Module, plan: ParallelPlan) -> nn.Module:
        """A model that has its weights, spread as this layout has it."""
        return model.to(self.device)

    def forward_backward(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], recipe: Objective, step: int
    ) -> StepOutput:
        """Gradients of (sum of losses over the global batch) / (count over the global batch)."""
        batches = [self.ready(micro, recipe) for micro in micro_batches]
        count = self.reduce(self._sum([recipe.count(batch) for batch in batches], micro_batches))
        per_count = (self.loss_scale.scale if self.loss_scale else 1.0) / count.clamp(min=1)
        losses = self.run_micro_batches(batches, micro_batches, per_count, recipe, step)
        return StepOutput(self.reduce(self._sum(losses, micro_batches)), count)

    def run_micro_batches(
        self,
        batches: Sequence[Any],
        micro_batches: Sequence[MicroBatch],
        per_count: Tensor,
        recipe: Objective,
        step: int,
    ) -> list[Tensor]:
        """Forward and backward of all of them, each through its loss times `per_count`, or times 0 if it is a filler.

        `batches` are the micro-batches as the model sees them.
        """
        losses = []
        for index, (batch, micro) in enumerate(zip(batches, micro_batches, strict=True)):
            self._seed_generators(step, index)
            scale = per_count * micro.weight
            with self.accumulate(self.engine, last=index == len(batches) - 1):
                with self.autocast(), self.scoring(batch, scale):
                    loss = recipe.loss(self.engine(**recipe.inputs(batch)), batch)
                if loss.ndim:
                    raise not_a_number(loss)
                if self.backs_plainly:
                    loss.backward(scale)  # for fewer operations than multiplying
                else:
                    self.back(loss, scale)
            losses.append(loss.detach().float())
        return losses

    def back(self, loss: Tensor, scale: Tensor) -> None:
        """Through a micro-batch's loss times `scale`, where that is not plain torch's."""
        raise NotImplementedError

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> StepInfo:
        """Unscales, clips and updates; an update whose gradient is not finite is skipped on the device.

        Fused optimizers do all of it inside their one kernel, through the two tensors that torch's GradScaler also
        sets, and the host does not wait to know. Others are given divided gradients, and the host waits.
        """
        gradients = self.gradients(optimizer)
        norm = self.norm(optimizer, gradients)
        if self.loss_scale:
            norm = norm / self.loss_scale.scale
        skipped = (norm - norm).ne_(0)  # 1 where the norm is infinite or NaN, whose difference to itself is NaN
        divisor = (norm / max_norm).clamp_(min=1) if max_norm else None
        if self.loss_scale:
            divisor = self.loss_scale.scale * (1 if divisor is None else divisor)
        if optimizer.defaults.get("fused"):
            optimizer.found_inf, optimizer.grad_scale = skipped, divisor  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
        elif not skipped:
            if divisor is not None:
                for gradient in gradients:
                    gradient.div_(divisor)
            optimizer.step()
        self.zero_gradients(optimizer)
        if self.loss_scale:
            self.loss_scale.update(skipped)
        return StepInfo(norm, skipped)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """What this rank's optimizer is about to use."""
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def norm(self, optimizer: Optimizer, gradients: list[Tensor]) -> Tensor:
        """Of the whole gradient, equal on all ranks."""
        return get_total_norm(gradients)

    def named_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """After a backward, those that are there; whole, or laid out as their parameters are."""
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def parameter_bytes(self, model: nn.Module) -> int:
        """What this rank holds of all weights."""
        return sum(local_part(parameter).nbytes for parameter in model.parameters())

    def zero_gradients(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def scoring(self, batch: Any, scale: Tensor | None = None) -> AbstractContextManager[None]:
        """Around a forward whose head is to give the loss instead of logits, where `loss_chunks` asks for it."""
        return nullcontext() if self.chunked_head is None else self.chunked_head.scoring(batch["labels"], scale)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, micro_batches: Sequence[MicroBatch], recipe: Objective) -> StepOutput:
        batches = [self.ready(micro, recipe) for micro in micro_batches]
        losses = self.score_micro_batches(model, batches, recipe)
        count = self._sum([recipe.count(batch) for batch in batches], micro_batches)
        return StepOutput(self.reduce(self._sum(losses, micro_batches)), self.reduce(count))

    def score_micro_batches(self, model: nn.Module, batches: Sequence[Any], recipe: Objective) -> list[Tensor]:
        losses = []
        for index, batch in enumerate(batches):
            self._seed_generators("eval", index)
            with self.autocast(), self.scoring(batch):
                losses.append(recipe.loss(model(**recipe.inputs(batch)), batch).float())
        return losses

    def preview(self, model: nn.Module, recipe: Any) -> str | None:
        """What the recipe has to show, if this layout can call the model as one likes."""
        shown: str | None = recipe.preview(model)
        return shown

    def state(self, model: nn.Module, optimizer: Optimizer) -> TrainState:
        self.sync_buffers(model)
        own = self.loss_scale.state() if self.loss_scale else {}
        return collect_state(model, optimizer, own)

    def shapes(self, named: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Of all tensors of the model, given those that this rank has a part of. All ranks call it."""
        return {name: [*tensor.shape] for name, tensor in named.items()}

    def over_stages(self, number: int) -> int:
        """The sum over ranks that have other tensors of the model. All ranks call it."""
        return number

    def load_state(self, model: nn.Module, optimizer: Optimizer, state: TrainState) -> None:
        own = self.loss_scale.state() if self.loss_scale else {}
        restore_state(model, optimizer, own, state)

    # The small verbs, for loops written by hand

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """The module to call in the forward; its parameters are those of `model`. The optimizer is built after it."""
        if self.loss_chunks > 1:
            raise UserError(
                "loss_chunks: wrap_model cannot chunk a loss that it does not see; use prepare, or a recipe"
            )
        return self.wrap(model, self._transform(model, ParallelPlan.derive(model)))

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-batch; gradients are exchanged in the last one alone."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        return autocast(self.precision, self.device)

    def backward(self, loss: Tensor) -> None:
        """Of a loss that is a mean over this rank's samples; gradients become the mean over ranks."""
        (loss * self.loss_scale.scale if self.loss_scale else loss).backward()

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clips, and returns the norm before it. `step(optimizer, max_norm)` does the same and the update."""
        self._refuse_loss_scale()
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def check_sync(self) -> None:
        """Raises if ranks did not do the same in the last step, where a layout needs that; called now and then."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The plain model inside what `wrap_model` and torch.compile put around it."""
        return uncompiled(model)

    def save_checkpoint(self, path: str | Path, model: nn.Module, optimizer: Optimizer, **state: Any) -> None:
        """Writes the folder `path`, there whole or not at all. All ranks call it; `state` is what JSON can hold."""
        path = Path(path)
        check_jsonable("state", state)
        occupied = path.exists() and not (path / MANIFEST).exists() and (path.is_file() or any(path.iterdir()))
        if self.highest(occupied):  # a save replaces what is there
            raise UserError(f"save_checkpoint: {path} exists and is no checkpoint; name another folder")
        plain = self.unwrap(model)
        about = {"layout": self.layout(), "optimizer": optimizer_settings(optimizer), **tied_and_buffers(plain)}
        write_checkpoint(path, self.state(plain, optimizer), state, about)

    def load_checkpoint(self, path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Puts back weights, moments, learning rates and the like, saved on any layout; returns the `state` given then.

        Raises UserError if it is of another model or optimizer, DamagedCheckpoint if any rank cannot read it.
        """
        path, plain = Path(path), self.unwrap(model)
        problem: Exception | None = None
        if not self.highest(path.is_dir()):
            raise UserError(f"load_checkpoint: there is no folder {path}")
        here = self.state(plain, optimizer).model  # together, whether or not this rank can read
        shapes = self.shapes(here)
        try:
            checkpoint = open_checkpoint(path)
            settings = checkpoint.manifest.get("optimizer")  # a run of the trainer has its config instead
            check_same_model(checkpoint, shapes, "build the model it was saved from")
            check_same_optimizer(optimizer, settings, path)
            loaded = checkpoint.checked_for(here, with_base=True)
        except (DamagedCheckpoint, UserError) as error:
            problem = error
        if self.highest(problem is not None):  # all ranks go on or none does
            raise problem or DamagedCheckpoint(f"{path}: another rank cannot read it")
        self.load_state(plain, optimizer, loaded)
        restore_settings(optimizer, settings)
        return checkpoint.trainer

    # Between them

    def ready(self, micro: MicroBatch, recipe: Objective) -> Any:
        """A micro-batch as the model sees it: on the device, with what the recipe draws for each sample."""
        return recipe.prepare(self.to_device(micro.data), SampleRng(self.seed, micro.epochs, micro.ids, self.device))

    def _refuse_loss_scale(self) -> None:
        if self.loss_scale:
            raise UserError(
                "clip_grad_norm cannot see through fp16's loss scale; use strategy.step(optimizer, max_norm)"
            )

    def _seed_generators(self, *place: int | str) -> None:
        """Seeds what a model draws from by its place in the run.

        Not by `torch.manual_seed`: it also remembers the seed for every kind of device that was never used, each with
        a traceback, which takes longer than many a step.
        """
        seed = mix(self.seed, *place, *self.draws_as)
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def _sum(self, values: Sequence[Tensor | int], micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Over the micro-batches that are not fillers."""
        counted = [value for value, micro in zip(values, micro_batches, strict=True) if micro.weight]
        first, *others = counted or [0 * values[0]]
        total = sum(others, start=first)
        return total if isinstance(total, Tensor) else torch.full((), total, device=self.device)


def not_a_number(loss: Tensor) -> UserError:
    return UserError(f"the recipe's loss has shape {[*loss.shape]}; it should be one number, a sum")
