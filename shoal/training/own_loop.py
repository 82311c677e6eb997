"""A run whose steps are written by hand, with all that surrounds the steps of a recipe.

    with shoal.Run("run.yaml", recipe=MyRecipe()) as run:
        for step in run.steps():
            for batch in step.batches:
                with step.accumulate(), run.autocast():
                    loss = mse_loss(run.model(batch["x"]), batch["y"])  # a mean over the batch
                    run.backward(loss)
            run.step()
            step.log(loss=loss)

Logging, evaluation, saving, resuming, signals and hang detection are those of any run. The recipe gives model, data and
parameter groups; it needs no `inputs` and no `loss`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from inspect import GEN_CLOSED, getgeneratorstate
from types import TracebackType
from typing import Any, Literal, Self
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.config import Run as Settings
from shoal.config.body import check_callbacks_of_body
from shoal.config.importable import NOT_IMPORTABLE, recorded_name
from shoal.config.schema import TrainingConfig
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.strategies import Loop
from shoal.training.diagnose import bad_parameter
from shoal.training.loop import Outcome, Shell
from shoal.training.optimizers import set_learning_rate
from shoal.training.report import Report
from shoal.training.session import Session
from shoal.training.trainer import RecipeBody, open_run
from shoal.types import MicroBatch, StepInfo, StepOutput, is_defined

LOOP = f"{NOT_IMPORTABLE}the loop of a script"
"""The recorded name of steps that are no function."""
FROM_CONFIG: Literal["training.max_grad_norm"] = "training.max_grad_norm"
Evaluation = Callable[[Any, Any], Mapping[str, Tensor | float]]
"""(run, batch) → metrics, each a mean over the batch."""


class Step:
    """One step of a run: its micro-batches, and the values to log."""

    def __init__(self, session: Session, micro_batches: Sequence[MicroBatch], index: int):
        assert session.loop is not None
        self.number = index + 1
        """The number of the step, as in the log: the first is 1."""
        self.batches = Batches(session.loop, session.recipe, micro_batches, index)
        self._loop: Loop = session.loop
        self._logged: dict[str, Tensor | float] = {}

    def accumulate(self) -> AbstractContextManager[None]:
        """Is entered around the forward and backward of one micro-batch; gradients are exchanged in the last one."""
        return self._accumulating(self.batches.current("step.accumulate()"))

    @contextmanager
    def _accumulating(self, index: int) -> Iterator[None]:
        self.batches.accumulates = True
        try:
            with self._loop.accumulate(last=index == len(self.batches) - 1):
                yield
        finally:
            self.batches.accumulates = False

    def log(self, **values: Tensor | float) -> None:
        """Notes values for the next line of the log, which has their means over ranks. The host does not wait.

        What is logged inside `for batch in step.batches` becomes the mean over the whole batch; outside, the last value
        counts. A name without a slash appears as `train/<name>`.
        """
        weight = self.batches.weight if self.batches.is_open else None
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UserError(f"step.log({name}=...): its shape is {[*value.shape]}; give a single number")
            single = value.detach().float().reshape(()) if isinstance(value, Tensor) else float(value)
            self._logged[name] = single if weight is None else self._logged.get(name, 0.0) + single * weight

    def read_log(self) -> dict[str, float]:
        """Returns the logged values, each the mean over ranks. All ranks call it, and the host waits."""
        strategy, names = self._loop.strategy, sorted(self._logged)
        seen = crc32(" ".join(names).encode())
        if strategy.max_over_ranks(seen) != -strategy.max_over_ranks(-seen):
            raise UserError(f"step.log: ranks logged different names, this one {', '.join(names) or 'none'}")
        if not names:
            return {}
        values = [torch.as_tensor(self._logged[name], device=strategy.device) for name in names]
        means = self._loop.reduce(torch.stack(values)).tolist()
        return {name if "/" in name else f"train/{name}": mean for name, mean in zip(names, means, strict=True)}


class Batches:
    """This rank's micro-batches of a step, on the device. Generators are seeded before each of them.

    A rank that runs out of samples gets a filler, so that all ranks go through as many: its weight is 0.
    """

    def __init__(self, loop: Loop, recipe: Any, micro_batches: Sequence[MicroBatch], step: int):
        self._loop, self._step, self._micro_batches = loop, step, micro_batches
        self._batches = loop.prepare_batches(micro_batches, recipe)
        counts: list[Tensor | int] = [recipe.count(batch) for batch in self._batches]
        self.count = loop.total(counts, micro_batches)
        """The number of samples or tokens of the whole batch."""
        self._counts = [count * micro.weight for count, micro in zip(counts, micro_batches, strict=True)]
        self._index: int | None = None
        self._passes = 0
        self.accumulates = False
        """True within `step.accumulate()`."""
        loop.seed(step, "body")

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        again = (self._passes,) if self._passes > 1 else ()  # the first time as the recipe would draw
        for index, batch in enumerate(self._batches):
            self._index = index
            self._loop.seed(self._step, index, *again)
            with nullcontext() if self._micro_batches[index].weight else self._loop.filler():
                yield batch
        self._index = None

    @property
    def is_open(self) -> bool:
        """True within a `for` over the micro-batches."""
        return self._index is not None

    def current(self, verb: str) -> int:
        """Returns which micro-batch is being computed."""
        if self._index is None and len(self) > 1:
            raise UserError(
                f"{verb} outside of `for batch in step.batches:`: a step has {len(self)} micro-batches, and it is not "
                "known which one this is; call it inside"
            )
        return self._index or 0

    def terms(self, verb: str) -> Tensor | int:
        """Returns how many samples or tokens of the global batch the current micro-batch has; 0 for a filler."""
        return self._counts[self.current(verb)]

    @property
    def weight(self) -> Tensor:
        """What a mean over the micro-batch counts in a mean over the whole batch, times the number of ranks."""
        share = self.terms("step.log()") / self.count
        # The root is 0 for a count of 0, and NaN for a negative one, so that the update is skipped.
        return torch.where(self.count > 0, share, self.count.sqrt()) * self._loop.num_data_ranks


class Verbs(ABC):
    """What the body of a step calls. They are those of `Loop`, for the model and optimizer of one session."""

    _session: Session | None = None
    _current: Step | None = None

    @property
    def session(self) -> Session:
        """The model in its place, with its optimizer."""
        assert self._session is not None
        return self._session

    @property
    def model(self) -> nn.Module:
        """The module to call. `session.model` is the plain model inside, with its own names."""
        return self.session.strategy.engine

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that `training.optimizer` describes. Its learning rate is set before every step."""
        return self.session.optimizer

    @property
    def recipe(self) -> Any:
        """The recipe."""
        return self.session.recipe

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.session.strategy.device

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.session.strategy.is_main_process

    @property
    def _loop(self) -> Loop:
        assert self.session.loop is not None
        return self.session.loop

    def autocast(self) -> AbstractContextManager[None]:
        """Is entered around the forward and the loss: computes in `training.mixed_precision`."""
        return self._loop.autocast()

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of a mean over the micro-batch: over samples, or over what `recipe.count` counts.

        Micro-batches are weighted by their counts, so that the gradient is that of the mean over the global batch,
        however it is split.
        """
        batches = self._in_step("run.backward()").batches
        if loss.ndim:
            raise UserError(f"run.backward: the loss has the shape {[*loss.shape]}; give the mean over the batch")
        if len(batches) > 1 and not batches.accumulates:
            raise UserError(
                f"run.backward: a step has {len(batches)} micro-batches; put `with step.accumulate():` around the "
                "forward and backward of each"
            )
        self._total = self._total + loss.detach().float() * batches.terms("run.backward()")
        self._loop.backward(loss * batches.weight)

    def clip(self, *, max_norm: float | None = None, max_value: float | None = None) -> None:
        """Makes the next `step` clip the gradient, by its norm or each element by its size."""
        self._in_step("run.clip()")
        self._loop.clip(max_norm=max_norm, max_value=max_value)

    def step(self, max_norm: float | Literal["training.max_grad_norm"] | None = FROM_CONFIG) -> StepInfo:
        """Unscales, clips, updates and clears the gradient; an update that is not finite is skipped.

        Without `max_norm` the gradient is clipped to `training.max_grad_norm`.
        """
        self._in_step("run.step()")
        info = self._update(max_norm)
        earlier = self._info
        self._info = info if earlier is None else replace(info, skipped=torch.maximum(earlier.skipped, info.skipped))
        return info

    def zero_grad(self) -> None:
        """Drops gradients without a step."""
        self._loop.zero_grad()

    def to_device(self, batch: Any) -> Any:
        """Moves the tensors of a batch to this rank's device, however nested."""
        return self._loop.to_device(batch)

    def reduce(self, tensor: Tensor, op: Literal["sum", "mean", "max"] = "mean") -> Tensor:
        """Returns the sum, mean or maximum over data-parallel ranks, on every rank. All ranks call it."""
        return self._loop.reduce(tensor, op)

    # Inside

    _info: StepInfo | None = None
    _total: Tensor
    last_step: Step
    """The step that ended last."""

    @abstractmethod
    def _update(self, max_norm: float | Literal["training.max_grad_norm"] | None) -> StepInfo:
        """Updates the model by the gradients that there are."""

    def _in_step(self, verb: str) -> Step:
        if self._current is None:
            raise UserError(f"{verb} is for the body of a step; call it inside `for step in run.steps():`")
        return self._current

    def _begin(self, micro_batches: Sequence[MicroBatch], index: int) -> Step:
        """Starts a step; `index` counts from 0."""
        self._loop.warm_up()
        self._current, self._info = Step(self.session, micro_batches, index), None
        self._total = torch.zeros((), device=self.device)
        return self._current

    def _end(self) -> tuple[StepOutput, StepInfo]:
        """Ends a step, and returns its results."""
        assert self._current is not None
        self.last_step = step = self._current
        self._current = None
        if self._info is None:
            raise UserError(f"step {step.number} ended without run.step(); call it once the backward is done")
        info, self._info = self._info, None
        return StepOutput(self.session.strategy.sum_over_data(self._total), step.batches.count), info


class OwnRun(Verbs):
    """A run whose steps are written by hand. It is opened where it is first used, and closed by `with`."""

    evaluation: Evaluation | None = None
    """Called as (run, batch) with each micro-batch of the evaluation data, without gradients; returns metrics, each a
    mean over the batch. Without it, the recipe's loss is evaluated."""
    outcome: Outcome | None = None
    """How the run ended, after its last step."""

    def __init__(self, settings: Settings, world: World | None = None, terminal: int = 2):
        self.settings, self._world, self._terminal = settings, world, terminal
        self._resources: ExitStack | None = None
        self._shell: Shell | None = None
        self._iterator: Generator[Step, None, None] | None = None
        self._failed = False
        """True if the body of `train` raised an error."""

    def __enter__(self) -> Self:
        self._resources = ExitStack()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the run. After a `break` it is evaluated and saved as at its end; after an error it is left as its last
        checkpoint has it."""
        resources = self._resources
        assert resources is not None
        try:
            self._leave(error)
        except BaseException as failure:
            resources.__exit__(type(failure), failure, failure.__traceback__)
            raise
        else:
            resources.__exit__(kind, error, trace)
        finally:
            self._resources = None

    def steps(self) -> Iterator[Step]:
        """Yields the steps that are left, and logs, evaluates and saves between them, as the config says.

        All ranks go through it together. After a signal, or where the data ends, there are no more steps.
        """
        if self.settings.body is not None:
            raise UserError(
                f"training.body = {self.settings.config.training.body!r}: run.steps() has a body of its own; leave the "
                "key out, or call run.train()"
            )
        return self._open_steps()

    def train(self, body: Callable[[Any, Step], None] | None = None) -> Outcome:
        """Calls `body(run, step)` for every step that is left; without a body, the one that `training.body` names.

        A function that can be imported is recorded in the run folder, so that `shoal train` can go on with the run.
        """
        self._set_body(body)
        function = self.settings.body
        self.evaluation = self.evaluation or getattr(function, "evaluation", None)
        with nullcontext() if self._resources is not None else self:
            steps, shell = self._open_steps(), self._open()
            for step in steps:
                self._failed = True  # unless the function returns
                with shell.stopping_at_interrupt():
                    function(self, step)
                self._failed = False
                if shell.stopped_by:
                    break
            self._leave(None)
        assert self.outcome is not None
        return self.outcome

    @property
    def session(self) -> Session:
        """The model in its place, with its optimizer."""
        return self._open().session

    # Inside

    def _set_body(self, body: Callable[[Any, Step], None] | None) -> None:
        """Notes the function that computes the steps, and its name for the run folder."""
        known = self.settings.body
        if body is None and known is None:
            raise UserError("run.train(): there is no body; pass a function body(run, step), or set training.body")
        if body is None or body is known:
            return
        if known is not None:
            raise UserError(
                f"training.body = {self.settings.config.training.body!r}, but run.train() got another function; leave "
                "one of them out"
            )
        if self._shell is not None:
            raise UserError("run.train(body): the run is open already; call it before run.model and the like")
        self.settings = _with_body(self.settings, body, recorded_name(body))

    def _open(self) -> Shell:
        """Opens the run, unless it is open."""
        if self._shell is None:
            if self._resources is None:
                raise UserError("shoal.Run: the run is not open; use it inside `with shoal.Run(...) as run:`")
            settings = self.settings if self.settings.body is not None else _with_body(self.settings, None, LOOP)
            check_callbacks_of_body(settings.callbacks)
            open_at = self._resources.enter_context(open_run(settings, self._world, self._terminal))
            self._shell = open_at(self._resources, None)
        return self._shell

    def _open_steps(self) -> Iterator[Step]:
        if self._iterator is not None:
            raise UserError("the steps of this run were taken already; make another shoal.Run")
        shell = self._open()
        recipe = shell.session.recipe
        if shell.loaders.evaluation and self.evaluation is None:
            for name in ("inputs", "loss"):
                if not is_defined(getattr(recipe, name)):
                    raise UserError(
                        f"recipe {type(recipe).__name__} has eval_data and no {name}; set run.evaluation to a function "
                        "(run, batch) -> metrics, or define inputs and loss"
                    )
        self._body = OwnBody(shell, self)
        self._body.check_best_metric(shell)
        self._iterator = self._take_steps(shell, self._body)
        return self._iterator

    def _take_steps(self, shell: Shell, body: OwnBody) -> Generator[Step, None, None]:
        shell.start(body)
        with shell.stopping_at_interrupt(), closing(shell.steps(body)) as steps:
            for micro_batches in steps:
                with body.around(micro_batches, shell.step):
                    rate = body.schedule(shell.step) * shell.hooks.run.learning_rate_scale
                    set_learning_rate(self.optimizer, rate)
                    yield self._begin(micro_batches, shell.step)
                    shell.taken = self._end()
        self.outcome = shell.finish(body)

    def _leave(self, error: BaseException | None) -> None:
        """Ends steps that were not taken to their end."""
        if self._shell is None or self._iterator is None:
            return
        was_left = getgeneratorstate(self._iterator) != GEN_CLOSED  # else it ended, or an error of the run ended it
        self._iterator.close()
        if error is None and was_left and not self._failed:
            if self._info is not None:  # the break came after the update, so that the step counts
                self._shell.taken = self._end()
                self._shell.count_step()
            elif self._current is not None:
                self._current = None
                self.zero_grad()
            self.outcome = self._shell.finish(self._body)
        if explained := self._loop.explain(error):
            raise explained from error

    def _update(self, max_norm: float | Literal["training.max_grad_norm"] | None) -> StepInfo:
        if self._body.before_update is not None:
            self._body.before_update()
        configured = self.settings.config.training.max_grad_norm
        if max_norm == FROM_CONFIG:
            return self._loop.step(max_norm=configured)
        default = TrainingConfig.model_fields["max_grad_norm"].default
        if configured not in (default, max_norm):
            raise UserError(
                f"training.max_grad_norm = {configured}, but the body calls run.step(max_norm={max_norm}); leave one "
                "of them out"
            )
        return self._loop.step(max_norm=max_norm)


class OwnBody(RecipeBody):
    """Evaluates and logs for steps that are written by hand."""

    def __init__(self, shell: Shell, run: OwnRun):
        super().__init__(shell)
        self._run = run

    def around(self, micro_batches: Sequence[MicroBatch], step: int) -> AbstractContextManager[None]:
        """Is entered around a step; the first of this process also shows what is in force."""
        return nullcontext() if self._report is None else self.first_step(micro_batches, step)

    def log(self) -> dict[str, float]:
        return {**super().log(), **self._run.last_step.read_log()}

    def explain_skips(self, micro_batches: Sequence[MicroBatch]) -> str:
        bad = bad_parameter(self.strategy, self.model)
        return bad or "look at what run.backward gets, or at the gradients before run.step"

    def _check_first_batch(self, report: Report, micro: MicroBatch, step: int) -> None:
        """Checks nothing: a body may compute anything."""

    def _always_gives(self, metric: str, prefixes: Iterable[str]) -> bool:
        return self._run.evaluation is None and super()._always_gives(metric, prefixes)

    def _evaluate_set(self, batches: Iterable[Sequence[MicroBatch]], shell: Shell) -> dict[str, float] | None:
        if self._run.evaluation is None:
            return super()._evaluate_set(batches, shell)
        sums, count = dict[str, Tensor](), torch.zeros((), device=self.strategy.device)
        for micro_batches in batches:
            for terms, values in self._score(micro_batches, self._run.evaluation):
                count = count + terms
                for name, value in values.items():
                    sums[name] = sums.get(name, torch.zeros_like(count)) + value * terms
            if shell.agree_to_stop():
                return None
            shell.watchdog.at("evaluation", shell.step)
        names = sorted(sums)
        total, *means = self.strategy.sum_over_data(torch.stack([count, *(sums[name] for name in names)])).unbind()
        return {name: (mean / total).item() for name, mean in zip(names, means, strict=True)}

    @torch.no_grad()
    def _score(
        self, micro_batches: Sequence[MicroBatch], evaluation: Evaluation
    ) -> list[tuple[Tensor | int, Mapping[str, Tensor | float]]]:
        """Returns the count of each micro-batch, 0 for a filler, and its metrics."""
        loop, scores = self._run._loop, []
        for index, batch in enumerate(loop.prepare_batches(micro_batches, self.recipe)):
            loop.seed("eval", index)
            terms = self.recipe.count(batch) * micro_batches[index].weight
            scores.append((terms, evaluation(self._run, batch)))
        return scores


def _with_body(settings: Settings, body: Any, name: str) -> Settings:
    """Returns the settings with steps of this recorded name."""
    if settings.config.training.loss_chunks > 1:
        raise UserError(
            f"training.loss_chunks = {settings.config.training.loss_chunks}: a loop of your own computes its loss "
            "itself; leave it out"
        )
    training = settings.config.training.model_copy(update={"body": name})
    config = settings.config.model_copy(update={"training": training})
    return replace(settings, config=config, body=body, sources={**settings.sources, "training.body": "shoal.Run"})
