"""Operators of torch written in Python, named `shoal::…`. torch.compile calls them and does not look inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_autograd, register_fake

from shoal.torch_private import replace_in_graphs

_LIBRARY = Library("shoal", "FRAGMENT")
_COMPUTED_BY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""By operator, the function that computes it, and the one that makes an empty result."""
IN_GRAPH = "_in_graph"
"""What the name of an operator ends with where a compiled graph calls it."""


def operator(name: str, empty: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the operator `shoal::name` of a function that changes none of its arguments.

    `empty` takes the same arguments and returns a result without its numbers, for torch.compile.

    torch.library.custom_op does the same and checks each call, which takes longer than most of these operators: a call
    with ten arguments took 58 µs there and takes 19 µs here. A model of small tensors waits for the host all the time.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        _COMPUTED_BY[name] = function, empty
        return _define(name, function, empty)

    return define


def give_gradient(name: str, backward: Callable[..., Any], keep: Callable[..., Any]) -> None:
    """Gives an operator its derivative; `keep(ctx, inputs, output)` keeps what `backward(ctx, gradient)` needs.

    Before each call torch asks, in Python, whether a gradient is needed, which takes as long as to launch a kernel. In
    a graph of torch.compile that has been answered: it calls a second operator, which has no derivative.
    """
    register_autograd(f"shoal::{name}", backward, setup_context=keep)
    replace_in_graphs(f"shoal::{name}", _define(name + IN_GRAPH, *_COMPUTED_BY[name]))


def _define(name: str, function: Callable[..., Any], empty: Callable[..., Any]) -> Callable[..., Any]:
    schema = infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    register_fake(f"shoal::{name}", empty)
    defined: Callable[..., Any] = getattr(torch.ops.shoal, name).default
    return defined
