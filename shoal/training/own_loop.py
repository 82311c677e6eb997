"""A run whose steps are written by hand, with all that surrounds the steps of a recipe.

    with shoal.Run("run.yaml", recipe=MyRecipe()) as run:
        for step in run.steps():
            for batch in step.batches:
                with step.accumulate(), run.autocast():
                    loss = mse_loss(run.model(batch["x"]), batch["y"])  # a mean over the batch
                    run.backward(loss)
            run.step()
            step.log(last=loss)

Logging, evaluation, saving, resuming, signals and hang detection are those of any run. The recipe gives model, data and
parameter groups; it needs no `inputs` and no `loss`. What the body of a step calls is in `own_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from inspect import GEN_CLOSED, getgeneratorstate
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from shoal.config import Run as Settings
from shoal.config.body import check_callbacks_of_body
from shoal.config.importable import NOT_IMPORTABLE, recorded_name
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.strategies.measures import NAME
from shoal.strategies.recipe_results import place_of
from shoal.training.diagnose import bad_parameter
from shoal.training.evaluation import KEPT_ON_DEVICE
from shoal.training.loop import Outcome, Shell
from shoal.training.metric_sums import Sums, add_up, means, sum_over_ranks, to_host
from shoal.training.optimizers import set_learning_rate
from shoal.training.own_steps import FROM_CONFIG, Logged, Step, Verbs, one_number
from shoal.training.report import Report, say_clipping
from shoal.training.session import Session
from shoal.training.trainer import RecipeBody, open_run
from shoal.types import MicroBatch, StepInfo, is_defined

LOOP = f"{NOT_IMPORTABLE}the loop of a script"
"""The recorded name of steps that are no function."""
Evaluation = Callable[[Any, Any], Mapping[str, Tensor | float]]
"""(run, batch) → metrics, each a mean over the batch."""


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
        self._clips: dict[str, float | None] = {}
        """What `run.clip` asked for since the last update."""

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

    def clip(self, *, max_norm: float | None = None, max_value: float | None = None) -> None:
        super().clip(max_norm=max_norm, max_value=max_value)
        self._check_max_norm(max_norm, "run.clip")
        self._clips = {"max_norm": max_norm, "max_value": max_value}

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
        self._body.check_followed_metrics(shell)
        self._iterator = self._take_steps(shell, self._body)
        return self._iterator

    def _take_steps(self, shell: Shell, body: OwnBody) -> Generator[Step, None, None]:
        shell.start(body)
        with shell.stopping_at_interrupt(), closing(shell.steps(body)) as steps:
            for micro_batches in steps:
                with body.around(micro_batches, shell.step):
                    rate = body.schedule(shell.step) * shell.hooks.run.learning_rate_scale
                    set_learning_rate(self.optimizer, rate)
                    step = self._begin(micro_batches, shell.step)
                    yield step
                    shell.taken = self._end()
                    body.logged.add(step)
        self.outcome = shell.finish(body)

    def _leave(self, error: BaseException | None) -> None:
        """Ends steps that were not taken to their end."""
        if self._shell is None or self._iterator is None:
            return
        was_left = getgeneratorstate(self._iterator) != GEN_CLOSED  # else it ended, or an error of the run ended it
        self._iterator.close()
        if error is None and was_left and not self._failed:
            if self._info is not None:  # the break came after the update, so that the step counts
                assert self._current is not None
                step = self._current
                self._shell.taken = self._end()
                self._body.logged.add(step)
                self._shell.count_step()
                shell = self._shell
                if shell.step % self.settings.config.logging.every == 0 or shell.step in (1, shell.total_steps):
                    shell.log(self._body, step.batches.micro_batches)
            elif self._current is not None:
                self._current = None
                self.zero_grad()
            self.outcome = self._shell.finish(self._body)
        if explained := self._loop.explain(error):
            raise explained from error

    def _update(self, max_norm: float | Literal["training.max_grad_norm"] | None) -> StepInfo:
        if self._body.before_update is not None:
            self._body.before_update()
        limits, self._clips = {"max_norm": None, "max_value": None, **self._clips}, {}
        configured, is_set = self._max_grad_norm()
        if max_norm != FROM_CONFIG:
            self._check_max_norm(max_norm, "run.step")
            limits["max_norm"] = limits["max_norm"] if max_norm is None else max_norm
        elif is_set or not any(limits.values()):
            limits["max_norm"] = configured
        self._body.clipping = say_clipping(**limits)
        return self._loop.step(max_norm=limits["max_norm"])

    def _max_grad_norm(self) -> tuple[float | None, bool]:
        """Returns `training.max_grad_norm`, and whether the user has set it."""
        return self.settings.config.training.max_grad_norm, "training.max_grad_norm" in self.settings.sources

    def _check_max_norm(self, max_norm: float | None, verb: str) -> None:
        """Refuses a limit that contradicts the one that the user has set in the config."""
        configured, is_set = self._max_grad_norm()
        if is_set and max_norm != configured and (max_norm or verb == "run.step"):
            raise UserError(
                f"training.max_grad_norm = {configured}, but the body calls {verb}(max_norm={max_norm}); leave one of "
                "them out"
            )


class OwnBody(RecipeBody):
    """Evaluates and logs for steps that are written by hand."""

    def __init__(self, shell: Shell, run: OwnRun):
        super().__init__(shell)
        self._run = run
        assert shell.session.loop is not None
        if self._report is not None:
            self._report.metrics_are_used = (
                "nowhere, because of run.evaluation" if run.evaluation else "in evaluations alone"
            )
        self.logged = Logged(shell.session.loop)
        self.logged.load(shell.checkpoints.progress.logged)
        shell.checkpoints.logged = self.logged.read

    def around(self, micro_batches: Sequence[MicroBatch], step: int) -> AbstractContextManager[None]:
        """Is entered around a step; the first of this process also shows what is in force."""
        return nullcontext() if self._report is None else self.first_step(micro_batches, step)

    def log(self, in_files: bool) -> dict[str, float]:
        logged = self.logged.read()
        if in_files:
            self.logged.clear()
        return {**super().log(in_files), **logged}

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
        scores, mine = list[dict[str, Any]](), Sums()
        for micro_batches in batches:
            scores += self._score(micro_batches, self._run.evaluation)
            if len(scores) >= KEPT_ON_DEVICE:
                mine = add_up(to_host(scores), mine)
                scores.clear()
            if shell.agree_to_stop():
                return None
            shell.watchdog.at("evaluation", shell.step)
        (sums,), _, _ = sum_over_ranks(self.strategy, [add_up(to_host(scores), mine)], {})
        return means(sums)

    @torch.no_grad()
    def _score(self, micro_batches: Sequence[MicroBatch], evaluation: Evaluation) -> list[dict[str, Any]]:
        """Returns the metrics of each micro-batch that is no filler, as sums and counts."""
        loop, scores = self._run._loop, []
        for index, batch in enumerate(loop.prepare_batches(micro_batches, self.recipe)):
            loop.seed("eval", index)
            count, values = self.recipe.count(batch), evaluation(self._run, batch)
            if not isinstance(values, Mapping):
                raise UserError(
                    f"{place_of(evaluation)}: the evaluation returned a {type(values).__name__}; return a dict of "
                    'means over the batch by name, such as {"loss": loss}'
                )
            for name in values:
                if not isinstance(name, str) or not NAME.fullmatch(name):
                    raise UserError(
                        f"{place_of(evaluation)}: the metric {name!r} is no good name; use letters, digits and _ . - /"
                    )
            if micro_batches[index].weight:
                numbers = {name: one_number(v, f"{place_of(evaluation)}: {name}") for name, v in values.items()}
                scores.append({name: (number * count, count) for name, number in numbers.items()})
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
