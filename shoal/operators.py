"""Operators of torch written in Python, named `shoal::…`. torch.compile calls them and does not look inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema

_LIBRARY = Library("shoal", "FRAGMENT")


def operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the operator `shoal::name` of a function that changes none of its arguments.

    torch.library.custom_op does the same and checks each call, which takes longer than most of these operators: a call
    with ten arguments took 58 µs there and takes 19 µs here. A model of small tensors waits for the host all the time.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        defined: Callable[..., Any] = getattr(torch.ops.shoal, name).default
        return defined

    return define
