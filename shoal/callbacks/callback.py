"""The base class of callbacks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from shoal.callbacks.hook_methods import HookMethods

if TYPE_CHECKING:
    from shoal.callbacks.run_handle import RunHandle


class Callback(HookMethods):
    """Something that happens in a run besides its steps. A subclass overrides the hooks that it needs."""

    class Config(BaseModel):
        """Declares the options of the callback in a config. Other options are refused."""

    def __init__(self, config: Any = None):
        self.config: Any = config if config is not None else self.Config()

    def evaluating(self, run: RunHandle) -> AbstractContextManager[None]:
        """Returns a context that surrounds each evaluation, such as one that replaces the weights."""
        return nullcontext()

    def why_idle(self, run: RunHandle) -> str:
        """Returns why the callback has no effect in this run, for the report; an empty text if it has one."""
        return ""

    def evaluated_weights(self) -> str | None:
        """Returns the kind of tensors in `state`, such as `average`, that `evaluating` puts in place of the weights."""
        return None
