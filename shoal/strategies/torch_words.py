"""Options as torch's FSDP, torch's examples and DeepSpeed name them, in the words of shoal's sections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any

from shoal.parallel.sharding.units import WrapPolicy


def translate_options(options: dict[str, Any]) -> WrapPolicy | None:
    """Changes the options of a preset to those of shoal's sections; returns a wrap policy that torch would call.

    What means nothing here stays as it is, for the sections to refuse.
    """
    for key, value in options.items():
        if isinstance(value, Enum):  # such as ShardingStrategy.FULL_SHARD and BackwardPrefetch.BACKWARD_PRE
            options[key] = value.name
    if "cpu_offload" in options:
        offload = options["cpu_offload"]
        options["cpu_offload"] = bool(getattr(offload, "offload_params", offload))  # torch's CPUOffload, or a bool
    if isinstance(number := options.get("min_num_params"), float) and number.is_integer():
        options["min_num_params"] = int(number)  # people write 1e6
    _translate_recomputation(options)
    policy: Any = options.get("auto_wrap_policy")
    if _is_classes(policy):
        del options["auto_wrap_policy"]
        options["wrap_classes"] = _class_names(policy)
    elif callable(policy) and not isinstance(policy, type):
        del options["auto_wrap_policy"]
        return policy
    elif policy is not None and not isinstance(policy, str):
        raise TypeError(
            f"auto_wrap_policy = {policy!r:.100}: give a set of module classes, 'transformer_based', 'size_based', or "
            "a function such as functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})"
        )
    elif policy is None and options.get("min_num_params") is not None:
        options["auto_wrap_policy"] = "size_based"
    return None


def translate_offload(section: dict[str, Any]) -> None:
    """Reads `offload_optimizer=True` as the CPU, as DeepSpeed's users write it."""
    for key in ("offload_optimizer", "offload_parameters"):
        if key in section and (section[key] is None or isinstance(section[key], bool)):
            section[key] = "cpu" if section[key] else "none"


def _translate_recomputation(options: dict[str, Any]) -> None:
    """Reads `activation_checkpointing` as a switch or as classes, and `activation_checkpointing_policy` as classes."""
    classes = options.pop("activation_checkpointing_policy", None)
    if classes is not None and not _is_classes(classes):
        raise TypeError(
            f"activation_checkpointing_policy = {classes!r:.100}: give a set of module classes, such as {{Block}}"
        )
    if "activation_checkpointing" not in options and classes is None:
        return
    mode: Any = options.get("activation_checkpointing")
    if _is_classes(mode):
        mode, classes = True, [*mode, *(classes or ())]
    if mode is False and classes is not None:
        raise TypeError(
            "activation_checkpointing = False recomputes nothing; leave out activation_checkpointing_policy"
        )
    if mode is None or isinstance(mode, bool):
        mode = "full" if mode or classes is not None else "none"
    if classes is not None:
        mode = {**(mode if isinstance(mode, Mapping) else {"mode": mode}), "classes": _class_names(classes)}
    options["activation_checkpointing"] = mode


def _is_classes(value: Any) -> bool:
    """Returns whether a value is a collection of module classes, or of their names."""
    is_list = isinstance(value, Collection) and not isinstance(value, str | Mapping)
    return is_list and all(isinstance(one, type | str) for one in value)


def _class_names(classes: Collection[Callable[..., Any] | str]) -> list[str]:
    return sorted({one if isinstance(one, str) else one.__name__ for one in classes})
