"""Activation checkpointing: a block's activations are recomputed in the backward instead of being kept.

It is a layer around the block's forward, so names stay as they are and hooks on `__call__` stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shoal.errors import UserError
from shoal.forward import add_layer
from shoal.operators import IN_GRAPH
from shoal.seeding import GeneratorsKept, HostStates
from shoal.tensors import module_state_kept
from shoal.torch_private import BATCH_NORM, hide_warning_about_contexts
from shoal.types import ParallelPlan

if TYPE_CHECKING:
    from shoal.config.schema import ActivationCheckpointingConfig

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEY = "training.activation_checkpointing"
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
_PRODUCTS |= {"shoal::multiply_4bit"}
_SMALL = "shoal::dropped_product"
"""The first product of an adapter. Its outputs are small, and take nearly as long to compute as those of the second."""


def apply_activation_checkpointing(
    model: nn.Module, plan: ParallelPlan, config: ActivationCheckpointingConfig
) -> list[str]:
    """Makes every n-th block, or module of the given classes, recompute its activations; returns their names."""
    if config.mode == "none":
        return []
    if config.classes:
        names = _names_by_class(model, config.classes, plan.head)
    elif plan.blocks:
        names = [*plan.blocks]
    else:
        raise UserError(
            f"{_KEY}.mode = {config.mode}, but the recipe's plan names no blocks to recompute; "
            f"name their classes in {_KEY}.classes, or the blocks in the recipe's parallel_plan"
        )
    hide_warning_about_contexts()
    chosen = names[:: config.every]
    for name in chosen:
        block = model.get_submodule(name)
        layer = _recompute_some if config.mode == "selective" else _recompute_all
        if config.mode == "full" and any(getattr(module, "fused", False) for module in block.modules()):
            layer = _recompute_but_small
        mixes = any(isinstance(module, BATCH_NORM) for module in block.modules())
        # Compiled blocks share a graph if they have the same layers, so that only blocks that need it get another one.
        add_layer(block, partial(layer, with_state_of=block) if mixes else layer)
    return chosen


_OPTIONS: dict[str, Any] = {"use_reentrant": False}
if "respect_saved_tensors_hooks" in signature(checkpoint).parameters:  # from torch 2.15 on
    # `offload` moves the inputs of blocks to the host, and not what `selective` keeps.
    _OPTIONS["respect_saved_tensors_hooks"] = False


def num_recomputed() -> int:
    """Returns how many modules this process recomputed, as proof that it engaged; compiled ones do not count."""
    return _Recomputing.times


def _recompute_all(
    forward: Callable[..., Any], *args: Any, with_state_of: nn.Module | None = None, **kwargs: Any
) -> Any:
    """Runs the forward, and again in the backward; running statistics in `with_state_of` move in the first alone."""
    if torch.compiler.is_compiling():
        return checkpoint(_forward, forward, kwargs, *args, **_OPTIONS)
    contexts = partial(_watched, with_state_of)
    return checkpoint(_forward, forward, kwargs, *args, context_fn=contexts, **_OPTIONS)


def _recompute_but_small(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `_recompute_all`, but a compiled block keeps the small outputs of its adapters' first products, which take 1%
    of the memory of all activations."""
    if not torch.compiler.is_compiling():
        return _recompute_all(forward, *args, **kwargs)
    kwargs.pop("with_state_of", None)
    return checkpoint(_forward, forward, kwargs, *args, context_fn=_kept_if_small, **_OPTIONS)


def _recompute_some(
    forward: Callable[..., Any], *args: Any, with_state_of: nn.Module | None = None, **kwargs: Any
) -> Any:
    """As `_recompute_all`, but keeps the outputs of some operations."""
    watched = partial(_kept_by_operation_watched, with_state_of)
    contexts = _kept_by_operation if torch.compiler.is_compiling() else watched
    return checkpoint(_forward, forward, kwargs, *args, context_fn=contexts, **_OPTIONS)


def _forward(forward: Callable[..., Any], kwargs: dict[str, Any], *args: Any) -> Any:
    # The keywords come as one positional argument: torch restores the random state of the devices that it finds in
    # positional arguments alone.
    return forward(*args, **kwargs)


class _Forward(AbstractContextManager[None]):
    """Is entered around a forward that will be repeated, and notes the states of Python's and NumPy's generators.

    A block that decides by `random.random()` whether to skip a layer must decide alike in the recomputation. torch
    itself repeats torch's random numbers alone.
    """

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self.states = HostStates()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.__exit__(*error)


class _Recomputing(AbstractContextManager[None]):
    """Is entered around a recomputation, counts it, and repeats the random numbers of its forward.

    Afterwards the buffers of a block that has a BatchNorm are as before: the forward has moved them once.
    """

    times = 0

    def __init__(self, inner: AbstractContextManager[Any], forward: _Forward, block: nn.Module | None) -> None:
        self._inner, self._forward, self._block = inner, forward, block

    def __enter__(self) -> None:
        _Recomputing.times += 1
        self._state = module_state_kept([self._block] if self._block else [])
        self._state.__enter__()  # outside of `inner`, which would take its copies for a part of the block
        self._inner.__enter__()
        self._generators = GeneratorsKept(self._forward.states)
        self._generators.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._generators.__exit__()
        result = self._inner.__exit__(*error)
        self._state.__exit__(None, None, None)  # also when torch ends the recomputation early, by an exception
        return result


def _watched(block: nn.Module | None) -> Contexts:
    forward = _Forward(nullcontext())
    return forward, _Recomputing(nullcontext(), forward, block)


def _kept_by_operation() -> Contexts:
    return create_selective_checkpoint_contexts(_policy())


def _kept_by_operation_watched(block: nn.Module | None) -> Contexts:
    inner_forward, recomputation = _kept_by_operation()
    forward = _Forward(inner_forward)
    return forward, _Recomputing(recomputation, forward, block)


def _kept_if_small() -> Contexts:
    return create_selective_checkpoint_contexts(_small_policy)


def _small_policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps the outputs of adapters' first products, and the numbers that say what these drop."""
    is_seed = operation.name().partition(".")[0] == "aten::randint" and [] in args
    keep = _kind(operation) == "small" or is_seed
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _policy() -> Callable[..., CheckpointPolicy]:
    """Returns a policy that keeps attention, communication and every second matrix product, and recomputes the rest."""
    # The forward and the recomputation come in the same order; some versions of torch ask in the forward alone.
    num_products = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kind = _kind(operation)
        if kind == "product":
            num_products[context.is_recompute] += 1
            keep = num_products[context.is_recompute] % 2 == 1
        else:
            # Attention with dropout draws random numbers. The recomputation must draw them too, or later draws would
            # differ from those of the forward.
            keep = kind in ("communication", "small") or (kind == "attention" and not _drops(args, kwargs))
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@cache
def _kind(operation: Any) -> str:
    name: str = operation.name().partition(".")[0].removesuffix(IN_GRAPH)  # of compiled blocks that are inside
    if name in _PRODUCTS:
        return "product"
    if name == _SMALL:
        return "small"
    if name.endswith("_"):  # it works in place, so there is no output to keep
        return "other"
    if name.startswith("_c10d_functional::"):
        return "communication"
    # By word, because every backend has its own operator: flash, efficient, cudnn, flex, flash for the CPU, others.
    return "attention" if "attention" in name or "attn" in name else "other"


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an attention drops out; dropout_p is the only float among its positional arguments."""
    return bool(kwargs.get("dropout_p")) or any(isinstance(value, float) and value > 0 for value in args)


def _names_by_class(model: nn.Module, classes: list[str], head: str | None) -> list[str]:
    """Returns the outermost modules of these classes, without the head, whose output the loss keeps in any case."""
    modules = dict(model.named_modules())
    modules.pop("")
    present = {type(module).__name__ for module in modules.values()}
    for wanted in classes:
        if wanted not in present:
            near = get_close_matches(wanted, sorted(present), n=3, cutoff=0.4) or sorted(present)[:5]
            raise UserError(
                f"{_KEY}.classes names {wanted!r}, but the model has no module of that class; "
                f"it has {', '.join(near) or 'no modules at all'}"
            )
    chosen: list[str] = []
    for name, module in modules.items():
        kind = type(module).__name__
        if kind not in classes or name == head:
            continue
        outer = next((other for other in chosen if name.startswith(f"{other}.")), None)
        if outer is None:
            chosen.append(name)
        elif (outer_kind := type(modules[outer]).__name__) != kind:
            raise UserError(
                f"{_KEY}.classes names both {outer_kind} and {kind}, but {name!r} is inside of {outer!r} and would be "
                f"computed three times; leave one of them out"
            )
    return chosen
