"""Calls the hooks of a recipe and of callbacks, and keeps their state for checkpoints."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shoal
from shoal.callbacks.hook_methods import HOOKS, HookMethods
from shoal.callbacks.run_handle import RunHandle, as_record
from shoal.checkpoint.peers import ALL
from shoal.checkpoint.pieces import StoredTensor
from shoal.config.callbacks import CallbackChoice
from shoal.config.yaml import format_value
from shoal.errors import UserError, one_line
from shoal.strategies.local_weights import LocalWeights
from shoal.strategies.module_state import find_not_in_json

RECIPE = "recipe"
"""The name of the recipe among those that have hooks."""
_SHOAL = str(Path(shoal.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class HookState:
    """What a checkpoint holds of the hooks."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """What hooks have changed in the run, such as the learning rate; nothing if they have changed nothing."""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What JSON can hold of the state, by the names of callback and value."""
    tensors: Mapping[str, Tensor | StoredTensor] = field(default_factory=dict)
    """By `<callback>/<name>`."""
    section: Any = None
    """The section `callbacks` of the config that it was saved with."""

    def as_json(self) -> dict[str, Any]:
        """Returns the entries of trainer.json."""
        return {key: dict(entry) for key, entry in (("hooks", self.run), ("callbacks", self.values)) if entry}


class Hooks:
    """The hooks that a run calls, in the order of the config, the recipe's first."""

    def __init__(self, recipe: Any, choices: tuple[CallbackChoice, ...], run: RunHandle):
        self.run = run
        self.members: dict[str, Any] = {RECIPE: recipe, **{choice.name: choice.build() for choice in choices}}
        self.calls: dict[str, list[tuple[str, Callable[..., None]]]] = {
            hook: [(name, getattr(member, hook)) for name, member in self.members.items() if _overrides(member, hook)]
            for hook in HOOKS
        }
        """The methods to call for each hook; a hook that nobody overrides has none."""
        self.has_any = any(self.calls.values())
        """True if anybody overrides a hook."""
        for name, member in self.members.items():
            _check_names(name, member)
        self._stateful = [name for name, member in self.members.items() if _overrides(member, "state")]
        for name in self._stateful:
            if not _overrides(self.members[name], "load_state"):
                raise UserError(f"{_say(name)} defines state and not load_state, so it could not resume; define both")
        self._callbacks = {name: member for name, member in self.members.items() if name != RECIPE}
        if len(evaluated := [name for name, callback in self._callbacks.items() if callback.evaluated_weights()]) > 1:
            raise UserError(
                f"callbacks: {' and '.join(evaluated)} both replace the weights in an evaluation; set "
                "use_for_evaluation to false in all but one"
            )
        self.has_ended = False
        """True if `on_end` was called at this step."""

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of all who override it. An error becomes one line that names the hook and the user's line."""
        for name, method in self.calls[hook]:
            try:
                method(self.run, *arguments)
            except Exception as error:
                _explain(error, name, hook)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surrounds an evaluation with what callbacks put around it."""
        with ExitStack() as contexts:
            for callback in self._callbacks.values():
                contexts.enter_context(callback.evaluating(self.run))
            yield

    def evaluated_weights(self) -> str | None:
        """Returns where a checkpoint has the weights that are evaluated, such as `ema/average`; None: in the model."""
        kinds = {name: callback.evaluated_weights() for name, callback in self._callbacks.items()}
        return next((f"{name}/{kind}" for name, kind in kinds.items() if kind), None)

    def agree(self, others: tuple[int, int]) -> tuple[int, int]:
        """Does what hooks of any rank have asked for; all ranks call it.

        Returns the highest of each of the two numbers over all ranks.
        """
        run = self.run
        mine = (run.requested_factor, run.requested_stop, others)
        factors, reasons, numbers = zip(*ALL.all_gather(mine), strict=True)
        if len({*factors}) > 1:
            raise UserError(
                f"scale_learning_rate: ranks asked for different factors, {min(factors):g} and {max(factors):g}; "
                "decide by what is equal on all ranks, such as the metrics of an evaluation"
            )
        run.learning_rate_scale *= factors[0]
        run.stop_reason = run.stop_reason or next(filter(None, reasons), None)
        run.has_request, run.requested_factor, run.requested_stop = False, 1.0, None
        signals, lates = zip(*numbers, strict=True)
        return max(signals), max(lates)

    def take_logged(self, metrics: Mapping[str, float], keep: bool) -> dict[str, float]:
        """Returns what hooks have logged, as numbers; `keep` leaves it for a later line as well."""
        logged = {name: float(value) for name, value in self.run.logged.items()}
        if twice := logged.keys() & metrics.keys():
            raise UserError(f"log({min(twice)!r}): the run logs a metric of this name itself; choose another")
        if not keep:
            self.run.logged.clear()
        return logged

    def take_histograms(self) -> dict[str, dict[str, Any]]:
        """Returns the histograms of all ranks as TensorBoard stores them; stages of a pipeline have different ones."""
        mine = {name: as_record(histogram) for name, histogram in self.run.histograms.items()}
        self.run.histograms.clear()
        return {name: record for name, record in ALL.union(mine).items() if record["num"]}

    def state(self) -> HookState:
        """Returns what a checkpoint has to hold."""
        values: dict[str, dict[str, Any]] = {}
        tensors: dict[str, Tensor] = {}
        for name in self._stateful:
            state = self.members[name].state()
            if problem := find_not_in_json({key: v for key, v in state.items() if not isinstance(v, Tensor)}):
                raise UserError(
                    f"{_say(name)}: state() returns {problem}, which a checkpoint does not hold; return tensors, "
                    "numbers, text, lists and dicts with text keys"
                )
            # A copy, because the file may be written while training goes on.
            values[name] = json.loads(json.dumps({k: v for k, v in state.items() if not isinstance(v, Tensor)}))
            tensors |= {f"{name}/{key}": v.detach() for key, v in state.items() if isinstance(v, Tensor)}
        if any(_is_sharded(name) for name in tensors):
            weights = self._local_weights()
            for name in filter(_is_sharded, tensors):
                owner, _, parameter = name.split("/", 2)
                if not weights.holds(parameter):
                    raise UserError(
                        f"{_say(owner)}: state() returns the tensor {name.removeprefix(f'{owner}/')!r}, but the model "
                        f"has no parameter or buffer {parameter!r}; a name with a slash is <kind>/<name of a parameter>"
                    )
            tensors = {
                name: weights.as_stored(name.split("/", 2)[2], tensor) if _is_sharded(name) else tensor
                for name, tensor in tensors.items()
            }
        return HookState(self._changes(), values, tensors)

    def _changes(self) -> dict[str, Any]:
        run = self.run
        changes: dict[str, tuple[Any, bool]] = {
            "learning_rate_scale": (run.learning_rate_scale, run.learning_rate_scale != 1.0),
            "stop_reason": (run.stop_reason, run.stop_reason is not None),
            "logged": ({name: float(value) for name, value in run.logged.items()}, bool(run.logged)),
            "has_ended": (True, self.has_ended),
        }
        return {key: value for key, (value, is_set) in changes.items() if is_set}

    def load_state(self, state: HookState, source: str, warn: Callable[[str], None]) -> None:
        """Takes back the state in a checkpoint, and says what does not fit the config; `source` is its name."""
        _check_changes(state.run, source)
        self.run.learning_rate_scale = state.run.get("learning_rate_scale", 1.0)
        self.run.stop_reason = state.run.get("stop_reason")
        self.run.logged = dict(state.run.get("logged", {}))
        self.has_ended = bool(state.run.get("has_ended", False))
        for name in state.values:
            if name not in self._stateful:
                warn(f"{source} has state of {_say(name)}, which this config does not have; it is dropped")
        for name in self._stateful:
            if name not in state.values:
                warn(f"{source} has no state of {_say(name)}, which starts fresh")
                continue
            tensors = {key.partition("/")[2]: t for key, t in state.tensors.items() if key.startswith(f"{name}/")}
            try:
                self.members[name].load_state({**state.values[name], **self._read(tensors)})
            except Exception as error:
                _explain(error, name, "load_state")

    def _read(self, tensors: Mapping[str, Tensor | StoredTensor]) -> dict[str, Tensor]:
        """Reads the tensors of a callback; of those that are sharded as parameters are, this rank's part."""
        weights = self._local_weights() if any("/" in key for key in tensors) else None
        read: dict[str, Tensor] = {}
        for key, stored in tensors.items():
            tensor_name = key.partition("/")[2]
            if weights is None or not tensor_name:
                read[key] = stored.read() if isinstance(stored, StoredTensor) else stored
            elif weights.holds(tensor_name):
                read[key] = weights.read_part(tensor_name, stored)
        return read

    def _local_weights(self) -> LocalWeights:
        return self.run.strategy.local_weights(self.run.model)

    def describe(self) -> str:
        """Returns the callbacks with their options, for the report."""
        return ", ".join(_describe(name, callback) for name, callback in self._callbacks.items())

    def idle(self) -> dict[str, str]:
        """Returns the callbacks that have no effect in this run, with the reasons, for the report."""
        reasons = {name: callback.why_idle(self.run) for name, callback in self._callbacks.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def describe_recipe(self) -> str:
        """Returns the names of the hooks that the recipe defines, for the report."""
        return ", ".join(hook for hook, calls in self.calls.items() if any(name == RECIPE for name, _ in calls))


def _overrides(member: Any, method: str) -> bool:
    if callable(vars(member).get(method)):  # a function that the object was given
        return True
    defined = getattr(type(member), method, None)
    return defined is not None and defined is not getattr(HookMethods, method)


def _check_names(name: str, member: Any) -> None:
    """Refuses a method that looks like a hook and is none, because nobody would call it.

    In a callback these are all that begin as hooks do, in a recipe only those that are nearly the name of one.
    """
    methods = [method for method in dir(type(member)) if method.startswith(("on_", "before_", "after_"))]
    for method in methods:
        near = get_close_matches(method, HOOKS, n=1, cutoff=0.85)
        if method not in HOOKS and callable(getattr(member, method)) and (near or name != RECIPE):
            meant = f"did you mean {near[0]}?" if near else f"hooks are {', '.join(HOOKS)}; or rename it"
            raise UserError(f"{_say(name)} defines {method}, which is not a hook and would never be called; {meant}")


def _is_sharded(name: str) -> bool:
    """Returns whether `<callback>/<kind>/<parameter>` is the name of a tensor that is sharded as a parameter is."""
    return name.count("/") > 1


def _say(name: str) -> str:
    return "the recipe" if name == RECIPE else f"the callback {name}"


def _describe(name: str, callback: Any) -> str:
    options: dict[str, Any] = callback.config.model_dump()
    shown = ", ".join(f"{key} {format_value(value)}" for key, value in options.items() if value is not None)
    return f"{name} ({shown})" if shown else name


def _check_changes(changes: Mapping[str, Any], source: str) -> None:
    """Refuses values that shoal does not write: a checkpoint is not trusted."""
    scale, reason = changes.get("learning_rate_scale", 1.0), changes.get("stop_reason")
    logged = changes.get("logged", {})
    is_right = (
        isinstance(scale, int | float)
        and isfinite(scale)
        and scale > 0
        and isinstance(reason, str | None)
        and isinstance(logged, dict)
        and all(isinstance(value, int | float) for value in logged.values())
    )
    if not is_right:
        raise UserError(f"{source}: `hooks` in trainer.json is {dict(changes)!r:.200}; start from another checkpoint")


def _explain(error: Exception, name: str, hook: str) -> None:
    """Raises an error of a hook as one line with the place in the user's code. Errors that explain themselves stay."""
    if isinstance(error, UserError):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((_SHOAL, _TORCH))]
    place = (users or frames)[-1]
    raise UserError(
        f"{_say(name)}, {hook}: {type(error).__name__}: {one_line(error)} ({place.filename}:{place.lineno} in "
        f"{place.name}: {place.line})"
    ) from error
