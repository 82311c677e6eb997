"""A proof in float64, for models whose gradient jumps: rounding errors are a billion times smaller there than in fp32.

Where a ReLU has an input of 0 except for rounding, or a max-pooling two equal ones, two layouts may decide differently,
and then their gradients differ by far more than rounding errors. In float64 that practically never happens, and
whatever is wrong with a layout is as wrong as in fp32.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor

from shoal.tensors import map_tensors


def recipe_in_float64(recipe: Any) -> Any:
    """Returns the recipe with batches whose floating-point tensors are cast to float64."""
    changed = copy.copy(recipe)
    changed.collate = partial(_collate, recipe.collate)
    return changed


def _collate(collate: Any, samples: Any) -> Any:
    return map_tensors(_to_float64, collate(samples))


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
