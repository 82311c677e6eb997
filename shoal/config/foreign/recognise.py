"""Which other project a config file belongs to, by its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.yaml import is_section

SIGNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "accelerate": (("distributed_type",), ("compute_environment", "num_processes")),
    "axolotl": (("base_model", "datasets"), ("base_model", "pretraining_dataset"), ("base_model", "micro_batch_size")),
    "llama_factory": (
        ("model_name_or_path", "stage"),
        ("model_name_or_path", "finetuning_type"),
        ("stage", "finetuning_type"),
    ),
    "torchtune": (("model._component_",), ("tokenizer._component_",), ("checkpointer._component_",)),
    "lightning": (("trainer.",), ("fit.trainer.",)),
}
"""By the name of a project: groups of dotted keys. A file with all keys of a group is one of the project's. A key that
ends in a dot is a section."""


def recognise(tree: Mapping[str, Any]) -> list[str]:
    """Returns the names of the projects that a file may belong to."""
    return [name for name, groups in SIGNS.items() if any(all(has_key(tree, key) for key in keys) for keys in groups)]


def has_key(tree: Mapping[str, Any], dotted: str) -> bool:
    """Returns whether a tree has a dotted key with a value; `section.` is a key whose value is a section."""
    if dotted.endswith("."):
        return is_section(value_of(tree, dotted[:-1]))
    return value_of(tree, dotted) is not None


def value_of(tree: Mapping[str, Any], dotted: str) -> Any:
    """Returns the value of a dotted key, or None."""
    value: Any = tree
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
