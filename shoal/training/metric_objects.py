"""Objects of the package torchmetrics in a recipe: computed over ranks, kept apart in evaluation, and saved."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.pieces import StoredTensor
from shoal.errors import UserError
from shoal.strategies import DistributedStrategy
from shoal.strategies.measures import is_metric_object
from shoal.training.metric_sums import gather_from_ranks

_REDUCTIONS = {"dim_zero_sum": "sum", "dim_zero_min": "min", "dim_zero_max": "max", "dim_zero_cat": "cat"}
"""torchmetrics' functions that add up states of ranks, and what shoal calls them."""
_STORED = re.compile(r"metrics\..+\.\d+-of-(\d{1,6})")
"""The name of a state in a checkpoint: its path, which rank's it is, and of how many ranks."""


class MetricObjects:
    """The torchmetrics objects that are attributes of a recipe, by path, such as `accuracy` or `scores.top5`.

    Each rank updates its objects with its samples. No rank exchanges anything before `compute`.
    """

    def __init__(self, recipe: Any, strategy: DistributedStrategy):
        self._recipe_name, self._strategy = type(recipe).__name__, strategy
        attributes = {name: value for kind in reversed(type(recipe).__mro__) for name, value in vars(kind).items()}
        self.by_path: dict[str, Any] = dict(_find({**attributes, **vars(recipe)}, ""))
        sides = strategy.layout.mesh
        self._is_shared = strategy.data_size * sides["cp"] > 1
        """True if several ranks have different samples or tokens, whose states have to be added up."""
        for path, metric in self.by_path.items():
            self._check(path, metric)
            metric.to(strategy.device)
            metric.compute_with_cache = False  # a rank with a cached value would leave the others waiting

    def _check(self, path: str, metric: Any) -> None:
        """Refuses an object whose states cannot be saved, or added up over ranks."""
        if _is_collection(metric):
            raise self._error(path, "shares states between its metrics; put them into a dict instead")
        if any(is_metric_object(module) for module in metric.children()):
            raise self._error(path, "wraps other metrics; return those instead")
        if metric.dist_sync_on_step:
            raise self._error(path, "has dist_sync_on_step=True, which makes ranks wait in every step; leave it out")
        for name, state in metric.metric_state.items():
            reduction = _reduction(metric, name)
            is_list = isinstance(state, list)
            additive = reduction == "cat" if is_list else reduction in ("sum", "min", "max")
            if not additive and (is_list or reduction == "mean" or self._is_shared):
                over = "cannot be saved" if is_list or reduction == "mean" else "cannot be added up over ranks"
                raise self._error(
                    path,
                    f"keeps the state {name!r} with dist_reduce_fx {reduction}, which {over}; use an object whose "
                    "states have sum, min or max, or cat for lists",
                )

    def _error(self, path: str, problem: str) -> UserError:
        return UserError(f"recipe {self._recipe_name}: {path} ({type(self.by_path[path]).__name__}) {problem}")

    def paths_of(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Returns the paths of the objects that these steps returned, by the name of the metric."""
        paths: dict[str, str] = {}
        for step in steps:
            for name, value in step.items():
                if not isinstance(value, tuple):
                    paths[name] = self._path_of(name, value)
        return paths

    def _path_of(self, name: str, metric: Any) -> str:
        for path, known in self.by_path.items():
            if known is metric:
                return path
        raise UserError(
            f"recipe {self._recipe_name}: the metric {name!r} is a {type(metric).__name__} that was no attribute of "
            "the recipe when the run began; make it in __init__, or in a list or dict there"
        )

    @torch.no_grad()
    def compute(self, paths: Mapping[str, str]) -> dict[str, float]:
        """Returns the values over all ranks by the name of the metric. All ranks call it together."""
        values: dict[str, float] = {}
        for name in sorted(paths):
            metric = self.by_path[paths[name]]
            before = metric.dist_sync_fn, metric.distributed_available_fn
            metric.dist_sync_fn, metric.distributed_available_fn = self._gather, self._is_distributed
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that a rank with only fillers never called `update`
                    value = metric.compute()
            finally:
                metric.dist_sync_fn, metric.distributed_available_fn = before
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = f"a tensor of shape {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
                raise self._error(paths[name], f"computes {shape}; use options that make it one number")
            values[name] = value.item()
        return values

    def _is_distributed(self) -> bool:
        return self._strategy.world_size > 1

    def _gather(self, state: Tensor, group: object = None) -> list[Tensor]:
        """Returns a state of all ranks that report metrics, as torchmetrics' own function does for all ranks.

        Of a list that is empty on some ranks, torchmetrics sends an empty float32 tensor, which would turn the others'
        labels into floats.
        """
        states: list[Tensor] = gather_from_ranks(self._strategy, state.cpu())
        filled = [other for other in states if other.numel()]
        return [other.to(state.device) for other in filled or states]

    def reset(self, paths: Mapping[str, str]) -> None:
        for path in set(paths.values()):
            self.by_path[path].reset()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Lets an evaluation use the objects from their start, and afterwards gives them back what training had."""
        kept = {path: _copy(metric) for path, metric in self.by_path.items()}
        for metric in self.by_path.values():
            metric.reset()
        try:
            yield
        finally:
            for path, metric in self.by_path.items():
                metric.reset()
                _set(metric, kept[path])

    def state(self) -> dict[str, Tensor]:
        """Returns the states of all ranks, for a checkpoint; equal on all ranks, which call it together.

        Ranks are kept apart, so that a resumed run adds up the same numbers in the same order.
        """
        if not self.by_path:
            return {}
        mine = {
            f"{path}.{name}": value.detach().cpu()
            for path, metric in self.by_path.items()
            for name, state in metric.metric_state.items()
            if (value := _as_tensor(state)) is not None
        }
        ranks = gather_from_ranks(self._strategy, mine)
        return {
            f"metrics.{key}.{index}-of-{len(ranks)}": tensor
            for index, states in enumerate(ranks)
            for key, tensor in states.items()
        }

    def load(self, stored: Mapping[str, Tensor | StoredTensor]) -> None:
        """Takes the states of this rank; with another number of ranks, the first one takes the sum.

        An object whose states have other shapes now, such as those of another number of classes, starts afresh.
        """
        sizes = {int(found[1]) for key in stored if (found := _STORED.fullmatch(key))}
        if not self.by_path or len(sizes) != 1:
            return
        (size,) = sizes
        reporting = gather_from_ranks(self._strategy, self._strategy.rank)
        index = reporting.index(self._strategy.rank) if self._strategy.rank in reporting else None
        for path, metric in self.by_path.items():
            metric.reset()
            parts = [_read_part(stored, path, metric, part, size) for part in range(size)]
            if index is not None and size == len(reporting):
                states = parts[index]
            else:
                states = _merge(metric, parts) if index == 0 else {}
            if all(_fits(metric.metric_state[name], state) for name, state in states.items()):
                device = self._strategy.device
                lists = {name for name, state in metric.metric_state.items() if isinstance(state, list)}
                _set(metric, {n: [s.to(device)] if n in lists else s.to(device) for n, s in states.items()})


def _find(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the torchmetrics objects among these values, and in dicts, lists and torch's containers among them."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if is_metric_object(value) or _is_collection(value):
            yield path, value
        elif isinstance(value, Mapping | nn.ModuleDict):
            yield from _find({str(key): inner for key, inner in value.items()}, f"{path}.")
        elif isinstance(value, list | tuple | nn.ModuleList):
            yield from _find({str(index): inner for index, inner in enumerate(value)}, f"{path}.")


def _is_collection(value: Any) -> bool:
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(value, package.MetricCollection)


def _reduction(metric: Any, name: str) -> str:
    """Returns how torchmetrics adds up a state over ranks. It has no public name for that."""
    function = metric._reductions[name]
    known = getattr(function, "__name__", str(function))
    return _REDUCTIONS.get(known, known.removeprefix("dim_zero_"))


def _copy(metric: Any) -> dict[str, Any]:
    """Returns the states; `reset` empties lists in place, and replaces tensors."""
    return {name: list(state) if isinstance(state, list) else state for name, state in metric.metric_state.items()}


def _set(metric: Any, states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        setattr(metric, name, state)


def _as_tensor(state: Tensor | list[Tensor]) -> Tensor | None:
    """Returns a state as one tensor, or None for an empty list. Lists are those that torchmetrics concatenates."""
    if isinstance(state, Tensor):
        return state
    return torch.cat([torch.atleast_1d(one) for one in state]) if state else None


def _read_part(
    stored: Mapping[str, Tensor | StoredTensor], path: str, metric: Any, part: int, size: int
) -> dict[str, Tensor]:
    keys = {name: f"metrics.{path}.{name}.{part}-of-{size}" for name in metric.metric_state}
    found = {name: stored[key] for name, key in keys.items() if key in stored}
    return {name: value.read() if isinstance(value, StoredTensor) else value for name, value in found.items()}


def _merge(metric: Any, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the states of all ranks as if one had seen all samples."""
    merged: dict[str, Tensor] = {}
    for name in metric.metric_state:
        states = [part[name] for part in parts if name in part]
        if not states:
            continue
        reduction = _reduction(metric, name)
        if reduction == "cat":
            merged[name] = torch.cat(states)
        elif reduction == "sum":
            merged[name] = torch.stack(states).sum(0).to(states[0].dtype)
        else:
            stacked = torch.stack(states)
            merged[name] = stacked.amin(0) if reduction == "min" else stacked.amax(0)
    return merged


def _fits(default: Tensor | list[Tensor], state: Tensor) -> bool:
    return isinstance(default, list) or (default.shape, default.dtype) == (state.shape, state.dtype)
