"""bitsandbytes' optimizers: AdamW and Lion with their state in 8 bits, or in memory that a GPU pages to the host."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.quantised.library import import_bitsandbytes

CLASSES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "lion_8bit": "Lion8bit",
}
"""The classes of bitsandbytes.optim by the names that `training.optimizer` has for them."""
MIN_PAGED_SIZE = 100_000
"""bitsandbytes pages the state of parameters of at least this size."""
MIN_8BIT_SIZE = 4096
"""Smaller parameters keep their state in 32 bits; bitsandbytes' default."""


@cache
def optimizer_class(name: str) -> type[Optimizer]:
    """Returns one of bitsandbytes' optimizers, so that it steps the local parts of sharded parameters.

    Raises UserError if bitsandbytes is missing.
    """
    base: Any = getattr(import_bitsandbytes(f"training.optimizer = {name}").optim, CLASSES[name])

    def get_config(self: Any, group_index: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of a parameter. Whether its state has 8 bits depends on the whole parameter, so that all
        ranks that have a part of it agree."""
        config: dict[str, Any] = base.get_config(self, group_index, index, group)
        parameter: Tensor = self.param_groups[group_index]["params"][index]
        is_large = getattr(parameter, "shard_of", parameter).numel() >= MIN_8BIT_SIZE
        return {**config, "min_8bit_size": 0 if is_large else parameter.numel() + 1}

    def update_step(self: Any, group: dict[str, Any], parameter: Tensor, group_index: int, index: int) -> None:
        """Updates a parameter. Of one without elements only the step is counted, as on other ranks: on a GPU,
        bitsandbytes would end the process."""
        if parameter.numel():
            base.update_step(self, group, parameter, group_index, index)
        else:
            self.state[parameter]["step"] += 1

    attributes = {
        "__module__": __name__,
        "__doc__": base.__doc__,
        "get_config": get_config,
        "update_step": update_step,
        "elementwise": True,
        "_cpu_paged_warned": True,  # bitsandbytes warns that it does not page on a CPU, which the report says
        "slots_of_parts": frozenset({"absmax1", "absmax2"}),
        "slots_of_large": frozenset({"absmax1", "absmax2", "qmap1", "qmap2"}),
    }
    return type(CLASSES[name], (base,), attributes)


def has_unpaged(optimizer: Optimizer) -> bool:
    """Returns whether a paged optimizer has state in memory that is not paged, of a parameter that is large enough."""
    states = ((parameter, state.get("state1")) for parameter, state in optimizer.state.items())
    return any(
        parameter.numel() >= MIN_PAGED_SIZE and kept is not None and not getattr(kept, "is_paged", False)
        for parameter, kept in states
    )
