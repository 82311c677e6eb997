"""How the micro-batches of a step are run: one after another, or overlapped by a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.parallel.batch_norm import SyncedBatchNorms
from shoal.parallel.pipeline.pipeline import Pipeline
from shoal.seeding import mix_after, seed_generators
from shoal.strategies.engines.plain import NOTHING, PlainEngine
from shoal.strategies.measures import Measures
from shoal.strategies.recipe_results import model_inputs
from shoal.tensors import module_state_kept
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.precision import autocast
from shoal.types import Objective


class Surroundings:
    """What surrounds the forward of a micro-batch: seeded generators, autocast, and a head that computes the loss."""

    def __init__(
        self,
        device: torch.device,
        precision: str,
        seed: int,
        rng_key: tuple[int, ...],
        head: ChunkedHead | None,
        batch_norms: SyncedBatchNorms | None = None,
    ):
        """Ranks with the same `rng_key` draw the same random numbers (dropout masks, noise)."""
        self.device, self.precision, self.head = device, precision, head
        self._seed_of, self._rng_key, self._batch_norms = mix_after(seed), rng_key, batch_norms

    def seed(self, *place: int | str) -> None:
        """Seeds the generators from a place in the run, such as (step, micro-batch)."""
        seed_generators(self._seed_of(*place, *self._rng_key), self.device)

    def enter(
        self, recipe: Objective, batch: Any, scale: Tensor | None, *place: int | str
    ) -> AbstractContextManager[None]:
        """Seeds the generators from the place, if one is given, and returns the context for one forward and its loss.

        `scale` is what the loss will be multiplied by in the backward.
        """
        if place:
            seed_generators(self._seed_of(*place, *self._rng_key), self.device)
        if self.head is None:
            return autocast(self.precision, self.device)
        return self._with_head(self.head, recipe.labels(batch), scale)

    @contextmanager
    def filler(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Is entered around the forward of a filler: buffers and extra state stay as they are.

        Synced BatchNorms move with the samples of other ranks.
        """
        synced = self._batch_norms
        with (
            synced.without_samples() if synced else nullcontext(),
            module_state_kept(modules, except_for=synced.modules if synced else ()),
        ):
            yield

    @contextmanager
    def _with_head(self, head: ChunkedHead, labels: Tensor, scale: Tensor | None) -> Iterator[None]:
        with autocast(self.precision, self.device), head.scoring(labels, scale):
            yield


class InTurn:
    """Runs micro-batches one after another."""

    def __init__(self, engine: PlainEngine, surroundings: Surroundings):
        self.engine, self.surroundings = engine, surroundings

    def forward_backward(
        self, batches: Sequence[Any], scales: Sequence[Tensor], recipe: Objective, measures: Measures, step: int
    ) -> list[Tensor]:
        """Runs forward and backward of each batch, whose loss is multiplied by its scale in the backward.

        Fillers change nothing, but take part in all collectives.
        """
        engine, losses, last = self.engine, list[Tensor](), len(batches) - 1
        try:
            if not engine.is_warm:
                self.warm_up(batches[0], recipe, measures, step)
            is_measured = engine.own_time.is_on
            if is_measured and engine.waits_in != "forward":
                engine.own_time.start()
            for index, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
                alone = self.surroundings.filler([engine.module]) if measures.is_filler(index) else NOTHING
                with engine.accumulate(index == last), alone:
                    with self.surroundings.enter(recipe, batch, scale, step, index):
                        loss = measures.loss(engine.module(**model_inputs(recipe, batch)), batch, index)
                    if engine.backward is None:
                        loss.backward(scale)  # fewer operations than multiplying the loss
                    else:
                        engine.backward(loss, scale)
                losses.append(loss.detach().float())
            if is_measured and engine.waits_in == "exchange":
                engine.own_time.stop()
            engine.exchange(step)
        except RuntimeError as error:
            if (explained := engine.explain(error)) is None:
                raise
            raise explained from error
        return losses

    def warm_up(self, batch: Any, recipe: Objective, measures: Measures, step: int) -> None:
        """Lets the engine see a first forward and backward, if it has to before the first step."""

        def loss_of_batch() -> Tensor:
            with self.surroundings.enter(recipe, batch, None, step, 0):
                return measures.loss_alone(self.engine.module(**model_inputs(recipe, batch)), batch)

        if not self.engine.is_warm:
            self.engine.warm_up(loss_of_batch)

    def score(self, model: nn.Module, batches: Sequence[Any], recipe: Objective, measures: Measures) -> list[Tensor]:
        """Computes the losses without a backward."""
        losses = []
        for index, batch in enumerate(batches):
            with self.surroundings.enter(recipe, batch, None, "eval", index):
                losses.append(measures.loss(model(**recipe.inputs(batch)), batch, index).float())
        return losses


class Overlapped:
    """Runs micro-batches through the stages of a pipeline. Losses appear on the last stage and go to all ranks."""

    def __init__(self, pipeline: Pipeline, surroundings: Surroundings):
        self.pipeline, self.surroundings = pipeline, surroundings

    def forward_backward(
        self, batches: Sequence[Any], scales: Sequence[Tensor], recipe: Objective, measures: Measures, step: int
    ) -> list[Tensor]:
        losses = self._zeros(len(batches))

        def score(output: Any, index: int) -> Tensor:
            loss = measures.loss(output, batches[index], index)
            losses[index] = loss.detach().float()
            return loss * scales[index]

        enter, modules = self._enter(recipe, batches, scales, step), [stage.module for stage in self.pipeline.stages]

        @contextmanager
        def around(index: int) -> Iterator[None]:
            with enter(index), self.surroundings.filler(modules) if measures.is_filler(index) else nullcontext():
                yield

        inputs = [dict(model_inputs(recipe, batch)) for batch in batches]
        self.pipeline.step(inputs, score, around)
        return self._from_last_stage(losses)

    def score(self, model: nn.Module, batches: Sequence[Any], recipe: Objective, measures: Measures) -> list[Tensor]:
        inputs = [dict(model_inputs(recipe, batch)) for batch in batches]
        enter = self._enter(recipe, batches, [None] * len(batches), "eval")
        losses = self.pipeline.evaluate(inputs, lambda output, i: measures.loss(output, batches[i], i).float(), enter)
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
