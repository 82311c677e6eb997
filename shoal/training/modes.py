"""Training and evaluation mode of a model's modules: a run starts from what the recipe built, and evaluation keeps it.

Modules of one model may be in different modes, such as a frozen backbone in evaluation mode, whose dropout is off and
whose BatchNorm does not move.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_NAMES_SHOWN = 3


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode and afterwards every module into the mode that it had before."""
    modes = [(module, module.training) for module in model.modules()]
    root_mode = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(root_mode)  # for modules whose `train` does more than set the mode, such as unmerging an adapter
        for module, mode in modes:
            module.training = mode


def start_training_mode(model: nn.Module) -> str:
    """Puts a model that came in evaluation mode into training mode; otherwise modes stay as the recipe set them.

    Returns what is unusual about the modes, for the report, or an empty string.
    """
    came_in_eval = not model.training
    if came_in_eval:
        model.train()
    modules = dict(model.named_modules())
    in_eval = [name for name, module in modules.items() if not module.training]
    remarks = ["the model came in eval mode and was put into training mode"] if came_in_eval else []
    if in_eval:
        outermost = [name for name in in_eval if name == "" or _parent_trains(name, modules)]
        shown = [name or "the model itself" for name in outermost[:_NAMES_SHOWN]]
        more = ", …" if len(outermost) > _NAMES_SHOWN else ""
        start = "" if came_in_eval else "training; "
        remarks.append(f"{start}{len(in_eval)} of {len(modules)} modules in eval mode ({', '.join(shown)}{more})")
    return "; ".join(remarks)


def _parent_trains(name: str, modules: dict[str, nn.Module]) -> bool:
    parent = modules.get(name.rpartition(".")[0])
    return parent is None or parent.training
