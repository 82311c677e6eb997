"""Checkpoints of any nested dict of tensors, numbers and text, such as people give to `torch.save`.

`{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}` becomes a checkpoint as all others are:
tensors in safetensors, everything else in JSON, and no code. The tensors of `model` have their own names, so that what
reads the weights of a checkpoint reads these, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.checkpoint.store import Checkpoint
from shoal.errors import UserError
from shoal.types import TrainState

TREE = "state_tree"
"""The key of trainer.json that has the nested dict, with the name of a tensor in the place of each tensor."""
_MODEL = "model"


def split_tree(state: Mapping[str, Any], caller: str) -> tuple[TrainState, dict[str, Any]]:
    """Returns the tensors of a nested dict, and the rest as what JSON can hold. Refuses what a checkpoint cannot hold.

    `caller` is for messages, such as `save_checkpoint`.
    """
    tensors = TrainState({}, {}, {}, {})

    def encode(value: Any, path: tuple[str, ...]) -> Any:
        place = f"{caller}: state" + "".join(f"[{key!r}]" for key in path)
        if isinstance(value, DTensor):
            raise UserError(f"{place} is sharded over ranks; use CheckpointManager.save(strategy, step, model=…, …)")
        if isinstance(value, Tensor):
            of_model = len(path) == 2 and path[0] == _MODEL
            section, name = (tensors.model, path[1]) if of_model else (tensors.strategy, "/".join((TREE, *path)))
            section[name] = value.detach()
            return {"tensor": name, "of_model": of_model}
        if isinstance(value, Mapping):
            return {"dict": [[_plain_key(key, place), encode(one, (*path, str(key)))] for key, one in value.items()]}
        if isinstance(value, list | tuple):
            items = [encode(one, (*path, str(index))) for index, one in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise UserError(
            f"{place} is a {type(value).__name__}, which a checkpoint does not hold; give tensors, numbers, text, "
            "lists and dicts"
        )

    return tensors, encode(state, ())


def _plain_key(key: Any, place: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise UserError(f"{place} has the key {key!r}; use text or whole numbers")


def read_tree(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Returns the nested dict of a checkpoint that `split_tree` made, or None if it is another one.

    The file is not trusted: it can only lead to tensors of the checkpoint itself.
    """
    if (tree := checkpoint.trainer.get(TREE)) is None:
        return None
    stored = checkpoint.stored_state()

    def decode(node: Any) -> Any:
        ((kind, content), *_) = node.items()
        match kind:
            case "tensor":
                section: Mapping[str, Any] = stored.model if node["of_model"] else stored.strategy
                return section[content].read()
            case "dict":
                return {key: decode(one) for key, one in content}
            case "list":
                return [*map(decode, content)]
            case "tuple":
                return tuple(map(decode, content))
        return content

    try:
        return dict(decode(tree))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{checkpoint.folder}: {TREE} in trainer.json is not one that shoal wrote: {error}") from None
