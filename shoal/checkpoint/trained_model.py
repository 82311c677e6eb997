"""The tensors and the model of a checkpoint, for exports and for use in Python.

A checkpoint is not trusted: only built-in recipes are asked to build a model, unless the caller passes one, and no code
that came with a checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.frozen_base import BaseTensor, FrozenBaseMissing
from shoal.checkpoint.inspect import as_dict
from shoal.checkpoint.latest import check_same_model
from shoal.checkpoint.pieces import StoredTensor
from shoal.checkpoint.store import Checkpoint
from shoal.config.run import RECIPE_SECTIONS, RECIPES, check_run
from shoal.errors import UserError, as_user_error
from shoal.lora.adapters import has_adapters, is_adapter_tensor
from shoal.quantised.layers import PARTS
from shoal.quantised.sources import Quantisation
from shoal.seeding import GeneratorsKept
from shoal.tensors import DTYPES, is_packed, named_tensors, replace_parameters, tensors_with_names
from shoal.types import Weights
from shoal.weights.materialise import build


class Source:
    """The tensors to export; `read` reads and converts one of them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str | None,
        adapter_only: bool,
        average: str | None,
        merge_into: str | None = None,
    ):
        """Raises FrozenBaseError if a file of the frozen base is missing."""
        self.merge_into = merge_into
        self.dtype = dtype
        self.averaged = _averaged_tensors(checkpoint, average) if average else {}
        self.checkpoint = checkpoint
        self.tensors: dict[str, StoredTensor] = checkpoint.stored_state().model  # type: ignore[assignment]
        for name, tensor in checkpoint.base.items() if not adapter_only else ():
            tensor.files.check(tensor.source.path)
            self.tensors[name] = tensor
        self.tensors |= self.averaged
        self.num_written = len(self.tensors)
        # Buffers keep their dtype: a table of angles or a counter would be wrong if it were rounded.
        buffers = checkpoint.manifest.get("buffers")
        kept = set(map(str, buffers)) if isinstance(buffers, list) else set()
        # So do packed weights, which are bytes in a dtype that may be floating-point.
        packed = [name.removesuffix(".statistics") for name in self.tensors if name.endswith(".statistics")]
        kept |= {f"{layer}.{part}" for layer in packed for part in PARTS}
        converted = dtype if merge_into is None else None  # adapters are merged as they were trained
        self.dtypes = {
            name: DTYPES[converted]
            if converted and tensor.dtype.is_floating_point and name not in kept
            else tensor.dtype
            for name, tensor in self.tensors.items()
        }
        aliases = as_dict(checkpoint.manifest.get("tied")).items()
        self.tied = {alias: name for alias, name in aliases if name in self.tensors and alias not in self.tensors}
        """Further names of tied tensors: alias → name."""

    def original(self, name: str) -> Tensor:
        """Returns the matrix in the files that a quantised weight was made from."""
        stored = self.tensors[name]
        if not self.has_originals([name]) or not isinstance(stored, BaseTensor):
            raise UserError(
                "--merge-into original: the weights that the base was quantised from are not known; use dequantised"
            )
        return stored.files.read(stored.pieces[0])

    def has_originals(self, names: Iterable[str]) -> bool:
        """Returns whether the files have the matrices that these quantised weights were made from."""
        made = [getattr(self.tensors[name], "derivation", None) for name in names]
        return all(isinstance(one, Quantisation) and not one.is_stored for one in made)

    def read(self, name: str) -> Tensor:
        """Returns a tensor in the dtype of the export."""
        stored = self.tensors[name].read()
        tensor = stored.to(self.dtypes[name])
        if tensor.dtype == torch.float16 and not tensor.isfinite().all() and stored.isfinite().all():
            raise UserError(f"--dtype fp16 cannot hold {name}, whose values go up to {stored.abs().max():g}; use bf16")
        return tensor


def _averaged_tensors(checkpoint: Checkpoint, callback: str) -> dict[str, StoredTensor]:
    """Returns the averages that a callback keeps in a checkpoint, by the names of the tensors that they replace."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for key, stored in checkpoint.stored_state().callbacks.items():
        owner, _, rest = key.partition("/")
        kind, _, name = rest.partition("/")
        if kind in ("average", "buffer"):
            found.setdefault(owner, {})[name] = stored  # type: ignore[assignment]
    if callback not in found:
        has = f"it has those of {', '.join(sorted(found))}" if found else "it has none"
        raise UserError(f"average {callback}: {checkpoint.folder} has no average of this callback; {has}")
    averages, shapes = found[callback], checkpoint.shapes
    if wrong := [name for name, stored in averages.items() if shapes.get(name) != [*stored.shape]]:
        raise UserError(f"average {callback}: {checkpoint.folder} has no tensor of the shape of {min(wrong)}'s average")
    return averages


def built_in_recipe(checkpoint: Checkpoint, reader: str, advice: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of the built-in recipe that a checkpoint was trained by, and the sections of its config.

    A manifest is not trusted: a name in it is looked up in `RECIPES` and never imported. `reader` and `advice` are for
    the UserError about any other recipe.
    """
    name = as_dict(checkpoint.manifest.get("config")).get("recipe")
    if not isinstance(name, str) or name not in RECIPES:
        trainer = f"by recipe {name!r}, which is not built in" if name else "without a recipe"
        raise UserError(
            f"{checkpoint.folder} was trained {trainer}, and {reader} runs no code that a checkpoint names; {advice}"
        )
    sections = recipe_sections(checkpoint)
    if sections.get("model", {}).get("trust_remote_code"):
        raise UserError(
            f"{checkpoint.folder} asks for model code that came with other weights (model.trust_remote_code), which "
            f"{reader} does not run; {advice}"
        )
    return name, _at_base(sections, checkpoint)


def _at_base(sections: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns sections whose `model.name` is the folder of the frozen weights, if it is a path that is not there.

    They may have been moved, or the path may have been relative to another folder. Raises FrozenBaseMissing if they are
    nowhere: an error about `model.name`, which nobody set now, would not help.
    """
    model, dataset = (as_dict(sections.get(key)) for key in ("model", "dataset"))
    name = model.get("name")
    folders = {piece.path.parent for tensor in checkpoint.base.values() for piece in tensor.pieces}
    if not isinstance(name, str) or Path(name).exists() or len(folders) != 1:
        return sections
    (folder,) = folders
    if Path(name).name == folder.name and not folder.exists():  # so it was no name on the Hub
        raise FrozenBaseMissing(f"{folder} does not exist")
    if not (folder / "config.json").is_file():
        return sections
    moved = {**sections, "model": {**model, "name": str(folder)}}
    return {**moved, "dataset": {**dataset, "tokenizer": str(folder)}} if dataset.get("tokenizer") == name else moved


def recipe_sections(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the sections of a checkpoint's config that belong to its recipe."""
    config = as_dict(checkpoint.manifest.get("config"))
    return {key: config[key] for key in RECIPE_SECTIONS if isinstance(config.get(key), dict)}


def make_recipe(name: str, sections: dict[str, Any], recipe_type: type[Any] | None = None) -> Any:
    """Returns the recipe with these sections; without `recipe_type` its class is imported by its name."""
    tree = {"recipe": name, "training": {"max_steps": 1, "batch_size": 1}, **sections}
    return check_run(tree, recipe=recipe_type).make_recipe()


def build_model(recipe: Any, source: Source, advice: str = "its config was altered; use --to safetensors") -> Any:
    """Returns the recipe's model with the checkpoint's weights, in evaluation mode.

    The config is not trusted: the model is built on the meta device, and its shapes are compared with the checkpoint's
    before it gets memory.
    """
    seed = as_dict(as_dict(source.checkpoint.manifest.get("config")).get("experiment")).get("seed")
    message = f"the model in the config of {source.checkpoint.folder} cannot be built"
    with as_user_error(message, RuntimeError, MemoryError), GeneratorsKept():
        model, _ = build(recipe.build_model, Weights("empty"), seed if type(seed) is int else 0)
    shapes = {name: [*tensor.shape] for name, tensor in named_tensors(model).items()}
    check_same_model(source.checkpoint, shapes, advice)
    first_names = {id(tensor): names[0] for tensor, names in tensors_with_names(model)}
    replace_parameters(model, lambda p: nn.Parameter(source.read(first_names[id(p)]).clone(), p.requires_grad))
    with torch.no_grad():
        for buffer in model.buffers():
            if id(buffer) in first_names:
                buffer.copy_(source.read(first_names[id(buffer)]))
    if (kept := getattr(getattr(recipe.config, "model", None), "dtype", None)) and has_adapters(model):
        # Without autocast whole modules that are trained beside a base in half precision must have its dtype, too.
        for name, parameter in model.named_parameters():
            if not is_adapter_tensor(name) and not is_packed(parameter):
                parameter.data = parameter.data.to(DTYPES[kept])
    return model.eval()


def compare(
    source: Source,
    reloaded: Mapping[str, Tensor],
    aliases: Mapping[str, str] | None = None,
    may_have_more: bool = False,
) -> None:
    """Raises UserError unless the exported tensors equal those of the checkpoint to the bit.

    A library may load them in a wider dtype. `aliases` are further names of tied tensors that must be there too.
    """
    names = {**{name: name for name in source.tensors}, **(aliases or {})}
    for name, stored_name in names.items():
        expected = source.read(stored_name)
        if name not in reloaded or not same_bits(reloaded[name].to(expected.dtype), expected):
            raise UserError(f"{name} differs in the exported file; nothing was exported")
    if not may_have_more and (more := reloaded.keys() - names.keys()):
        raise UserError(f"the exported file has {min(more)!r}, which the checkpoint does not; nothing was exported")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are equal to the bit, NaN included."""
    return a.shape == b.shape and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))
