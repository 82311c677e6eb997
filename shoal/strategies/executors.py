"""How the micro-batches of a step are run: one after another, or overlapped by a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config.mesh import micro_batches_needed
from shoal.errors import UserError
from shoal.parallel.pipeline.pipeline import Pipeline
from shoal.seeding import mix, seed_generators
from shoal.strategies.engines.plain import PlainEngine
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.precision import autocast
from shoal.types import MicroBatch, Objective


class Surroundings:
    """What surrounds the forward of a micro-batch: seeded generators, autocast, and a head that computes the loss."""

    def __init__(
        self, device: torch.device, precision: str, seed: int, rng_key: tuple[int, ...], head: ChunkedHead | None
    ):
        """Ranks with the same `rng_key` draw the same random numbers (dropout masks, noise)."""
        self.device, self.precision, self.head = device, precision, head
        self._seed, self._rng_key = seed, rng_key

    def enter(
        self, recipe: Objective, batch: Any, scale: Tensor | None, *place: int | str
    ) -> AbstractContextManager[None]:
        """Seeds the generators and returns the context for one forward and its loss.

        `scale` is what the loss will be multiplied by in the backward.
        """
        self.seed_generators(*place)
        if self.head is None:
            return autocast(self.precision, self.device)
        return self._with_head(self.head, recipe.labels(batch), scale)

    @contextmanager
    def _with_head(self, head: ChunkedHead, labels: Tensor, scale: Tensor | None) -> Iterator[None]:
        with autocast(self.precision, self.device), head.scoring(labels, scale):
            yield

    def seed_generators(self, *place: int | str) -> None:
        """Seeds the generators of Python, NumPy and torch from the place in the run, such as (step, micro-batch)."""
        seed_generators(mix(self._seed, *place, *self._rng_key), self.device)


class InTurn:
    """Runs micro-batches one after another."""

    def __init__(self, engine: PlainEngine, surroundings: Surroundings):
        self.engine, self.surroundings = engine, surroundings

    def forward_backward(
        self,
        batches: Sequence[Any],
        micro_batches: Sequence[MicroBatch],
        per_count: Tensor,
        recipe: Objective,
        step: int,
    ) -> list[Tensor]:
        """Runs forward and backward of each batch, whose loss is multiplied by `per_count` and its weight (0 or 1).

        `batches` are the data of the micro-batches as the model sees them.
        """
        engine, enter, losses, last = self.engine, self.surroundings.enter, list[Tensor](), len(batches) - 1
        try:
            if not engine.is_warm:
                engine.warm_up(lambda: self._loss(engine.module, batches[0], recipe, None, step, 0))
            for index, batch in enumerate(batches):
                scale = per_count * micro_batches[index].weight
                with engine.accumulate(index == last):
                    with enter(recipe, batch, scale, step, index):
                        loss = recipe.loss(engine.module(**recipe.inputs(batch)), batch)
                    if loss.ndim:
                        raise not_scalar(loss)
                    if engine.backward is None:
                        loss.backward(scale)  # fewer operations than multiplying the loss
                    else:
                        engine.backward(loss, scale)
                losses.append(loss.detach().float())
        except RuntimeError as error:
            if (explained := engine.explain(error)) is None:
                raise
            raise explained from error
        return losses

    def score(self, model: nn.Module, batches: Sequence[Any], recipe: Objective) -> list[Tensor]:
        """Computes the losses without a backward."""
        return [self._loss(model, b, recipe, None, "eval", index).float() for index, b in enumerate(batches)]

    def _loss(self, model: nn.Module, batch: Any, recipe: Objective, scale: Tensor | None, *place: int | str) -> Tensor:
        with self.surroundings.enter(recipe, batch, scale, *place):
            return recipe.loss(model(**recipe.inputs(batch)), batch)


class Overlapped:
    """Runs micro-batches through the stages of a pipeline. Losses appear on the last stage and go to all ranks."""

    def __init__(self, pipeline: Pipeline, surroundings: Surroundings):
        self.pipeline, self.surroundings = pipeline, surroundings

    def forward_backward(
        self,
        batches: Sequence[Any],
        micro_batches: Sequence[MicroBatch],
        per_count: Tensor,
        recipe: Objective,
        step: int,
    ) -> list[Tensor]:
        # A short step at the end of the data is filled up with micro-batches of weight 0.
        needed = micro_batches_needed(self.pipeline.schedule, self.pipeline.num_stages)
        fillers = [batches[0]] * max(0, needed - len(batches))
        filled = [*batches, *fillers]
        scales = [per_count * weight for weight in (*(micro.weight for micro in micro_batches), *(0 for _ in fillers))]
        losses = self._zeros(len(filled))

        def score(output: Any, index: int) -> Tensor:
            loss = recipe.loss(output, filled[index])
            if loss.ndim:
                raise not_scalar(loss)
            losses[index] = loss.detach().float()
            return loss * scales[index]

        self.pipeline.step([recipe.inputs(b) for b in filled], score, self._enter(recipe, filled, scales, step))
        return self._from_last_stage(losses[: len(batches)])

    def score(self, model: nn.Module, batches: Sequence[Any], recipe: Objective) -> list[Tensor]:
        inputs = [recipe.inputs(batch) for batch in batches]
        enter = self._enter(recipe, batches, [None] * len(batches), "eval")
        losses = self.pipeline.evaluate(inputs, lambda output, i: recipe.loss(output, batches[i]).float(), enter)
        return self._from_last_stage(losses or self._zeros(len(batches)))

    def _enter(
        self, recipe: Objective, batches: Sequence[Any], scales: Sequence[Tensor | None], place: int | str
    ) -> Callable[[int], AbstractContextManager[None]]:
        return lambda index: self.surroundings.enter(recipe, batches[index], scales[index], place, index)

    def _zeros(self, number: int) -> list[Tensor]:
        return [torch.zeros((), device=self.surroundings.device) for _ in range(number)]

    def _from_last_stage(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """Hands the last stage's losses to all stages; the others have zeros."""
        shared = torch.stack([*losses])
        dist.all_reduce(shared, group=self.pipeline.group)
        return list(shared.unbind())


def not_scalar(loss: Tensor) -> UserError:
    return UserError(f"the recipe's loss has shape {[*loss.shape]}; it should be one number, a sum")
