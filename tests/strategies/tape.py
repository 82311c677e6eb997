"""A recording of operations on the CPU, as a CUDA graph is one of kernels: it computes into the same memory again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Keeps the operations of torch that a function calls, with the tensors that they read and write.

    What Python computes is in it as it was, as in a CUDA graph. A capture computes nothing; here, what was computed
    meanwhile is taken back.
    """

    def __init__(self, shared: Tape | None = None):
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def record(self, function: Callable[[], None]) -> None:
        try:
            with self:
                function()
        finally:
            for storage, value in reversed(self._before):
                storage.copy_(value)
            self._before.clear()

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, result in self.calls:
                for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not all operations that write say so in their schema.
        read = (leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self._before += [(storage, storage.clone()) for storage in read]
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result
