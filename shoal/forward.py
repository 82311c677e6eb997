"""Layers around a module's forward, and views of its parameters: how a model is changed and keeps its names.

A layer is a function `layer(forward, *args, **kwargs)` that is called in the place of a module's forward and may call
`forward`. Layers stack: the one that was added last is the outermost. Hooks on `__call__`, such as those by which
fully_shard gathers weights, stay outside of all layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shoal.errors import UserError
from shoal.torch_private import break_graph, has_dispatch_mode

Layer = Callable[..., Any]
View = Callable[[Tensor], Tensor | None]

_VIEWS, _MADE = "_parameter_views", "_made_views"


def add_layer(module: nn.Module, layer: Layer) -> None:
    """Puts a layer around the module's forward. A deep copy of the module has none.

    Every layer is called from the same few lines, so that torch.compile makes one graph for blocks that are alike.
    """
    inner = module.forward
    if "__deepcopy__" not in vars(module):
        vars(module)["__deepcopy__"] = partial(_copy_without_layers, module, vars(module).get("forward"))

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return layer(inner, *args, **kwargs)

    module.forward = forward


def _copy_without_layers(module: nn.Module, forward: Callable[..., Any] | None, memo: dict[int, Any]) -> Any:
    """Returns a deep copy of a module that has its first forward: layers compute with the weights of the original."""
    kind = type(module)
    own = getattr(kind, "__deepcopy__", None)
    if own is not None:  # as of modules that fully_shard has changed
        return own(module, memo)
    copied = memo[id(module)] = kind.__new__(kind)
    state = {name: value for name, value in vars(module).items() if name not in ("forward", "__deepcopy__")}
    if _VIEWS in state:
        forward = _refuse_to_compute
    vars(copied).update(copy.deepcopy(state | ({"forward": forward} if forward is not None else {}), memo))
    return copied


def _refuse_to_compute(*args: Any, **kwargs: Any) -> Any:
    raise UserError(
        "this copy of a module has its weights, and cannot compute with them, because the module sees others in their "
        "place; build the model again and give it the weights (load_state_dict), or use shoal.load"
    )


def make_views_before(module: nn.Module) -> None:
    """Adds a layer that makes the views of the module and its members before the module's present forward is called.

    Compiled forwards need it: torch captures no graph of a recomputed block that writes attributes, nor (2.13) of one
    that takes DTensors, whose DeviceMesh it would save for the backward. Layers that are added afterwards, and may call
    the forward again in the backward, are outside.
    """
    viewed = [member for member in module.modules() if _VIEWS in vars(member)]
    if viewed:
        add_layer(module, partial(_call_compiled, viewed))


def computes_as_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether a module is a linear layer whose forward is called.

    Some subclasses, such as routers of experts, compute other things; so do layers whose forward somebody replaced. The
    last class is that of a layer inside of nn.MultiheadAttention, which reads the weight and calls no forward.
    """
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_linear and "forward" not in vars(module) and not isinstance(module, NonDynamicallyQuantizableLinear)


def view_parameters(module: nn.Module, view: View, hidden: tuple[str, ...] = ()) -> None:
    """Makes the module's forward see `view(parameter)` of each of its own parameters, and None for those `hidden`.

    Whoever lists, stores or shards the parameters still finds them as they are.
    """
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    if not names:
        return

    def with_views(forward: Layer, *args: Any, **kwargs: Any) -> Any:
        return call_with_views(module, forward, *args, **kwargs)

    declare_views(module, {name: (lambda parameter: None) if name in hidden else view for name in names})
    add_layer(module, with_views)


def declare_views(module: nn.Module, views: Mapping[str, View]) -> None:
    """Says what a module sees of its parameters within `call_with_views`. The views are properties of a subclass."""
    vars(module)[_VIEWS], vars(module)[_MADE] = dict(views), {}
    module.__class__ = _class_with_views(type(module), tuple(views))  # type: ignore[arg-type]  # mypy on hashing a type


def remove_views(module: nn.Module) -> None:
    """Undoes `declare_views`."""
    del vars(module)[_VIEWS], vars(module)[_MADE]
    module.__class__ = type(module).__bases__[0]


def call_with_views(module: nn.Module, forward: Layer, *args: Any, **kwargs: Any) -> Any:
    """Calls a module's forward, which sees the declared views in the place of its parameters."""
    if module._made_views:
        return forward(*args, **kwargs)  # the compiled module around it made the views
    if torch.compiler.is_compiling():
        break_graph()  # a user compiles, and nobody has made them; without them, the adapters would be left out
    return _call_with_views_of([module], forward, *args, **kwargs)


def _call_compiled(modules: list[nn.Module], forward: Layer, *args: Any, **kwargs: Any) -> Any:
    """Calls a compiled forward with the views of these modules."""
    # torch.compile leaves everything uncompiled where a mode counts operations. A recomputation would then make the
    # views again, among its operations, so the forward has to do the same.
    return forward(*args, **kwargs) if has_dispatch_mode() else _call_with_views_of(modules, forward, *args, **kwargs)


def _call_with_views_of(modules: list[nn.Module], forward: Layer, *args: Any, **kwargs: Any) -> Any:
    _make_views(modules)
    try:
        return forward(*args, **kwargs)
    finally:
        _drop_views(modules)


def _make_views(modules: list[nn.Module]) -> None:
    for module in modules:
        views: dict[str, View] = vars(module)[_VIEWS]
        vars(module)[_MADE] |= {name: view(module._parameters[name]) for name, view in views.items()}  # type: ignore[arg-type]


def _drop_views(modules: list[nn.Module]) -> None:
    for module in modules:
        vars(module)[_MADE].clear()


@cache
def _class_with_views(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def property_of(name: str) -> property:
        def look(module: Any) -> Tensor | None:
            made = module._made_views
            return made[name] if name in made else module._parameters[name]

        return property(look)

    return type(kind.__name__, (kind,), {name: property_of(name) for name in names})
