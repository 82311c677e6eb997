"""Export: writes the weights of a checkpoint as a Hugging Face folder, a safetensors file or a torch state dict.

An export is written beside its final name, opened again with the library that others will use, compared with the
checkpoint tensor by tensor, and only then renamed. A checkpoint is not trusted: only built-in recipes are asked to
build a model, and no code that came with a checkpoint is run.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.checkpoint.folders import discard, flush, swap_in
from shoal.checkpoint.frozen_base import FrozenBaseError, base_files, find_base_in
from shoal.checkpoint.inspect import as_dict, open_step_folder
from shoal.checkpoint.latest import check_same_model
from shoal.checkpoint.manifest import dtype_name
from shoal.checkpoint.pieces import StoredTensor, dtype_in_files, write_safetensors
from shoal.checkpoint.store import Checkpoint
from shoal.config.run import RECIPE_SECTIONS, RECIPES, check_run, import_recipe
from shoal.errors import UserError, as_user_error, one_line
from shoal.seeding import GeneratorsKept
from shoal.tensors import DTYPES, named_tensors, replace_parameters, tensors_with_names
from shoal.types import Weights
from shoal.weights.materialise import build

SHARD_SIZE = "5GB"
LOGITS_TOLERANCE, HALF_LOGITS_TOLERANCE = 1e-4, 2e-2
"""How much the logits of the reloaded model may differ, relative to the largest: it may add up in another order."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_EXPORTED_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja", ".md"}


def export(
    step_dir: Path,
    out: Path,
    to: str,
    dtype: str | None = None,
    force: bool = False,
    base: Path | None = None,
    adapter_only: bool = False,
    average: str | None = None,
) -> dict[str, Any]:
    """Writes the weights of a checkpoint to `out`, and compares what was written with the checkpoint.

    `dtype` converts the parameters; without it they stay as stored. The frozen base is read from the files in the
    manifest, or from `base`; `adapter_only` leaves it out. `average` names a callback, such as `ema`, whose average
    of the weights is exported in their place. Returns what `shoal checkpoint export --json` prints.
    """
    for option, value, choices in (("--to", to, _WRITERS), ("--dtype", dtype or "fp32", DTYPES)):
        if value not in choices:
            raise UserError(f"{option} {value} is not one of {', '.join(choices)}")
    checkpoint = open_step_folder(step_dir)
    _check_options(checkpoint, to, base, adapter_only)
    _check_target(out, to, force)
    if out.resolve().is_relative_to(step_dir.resolve()):
        raise UserError(f"{out} is inside the checkpoint, which must not change; choose another place")
    if base:
        checkpoint = replace(checkpoint, base=find_base_in(base, checkpoint.base))
    files = ", ".join(base_files(checkpoint.base))
    beside = out.absolute().with_name(f".{out.absolute().name}.part")
    try:
        with as_user_error(f"{out} cannot be written", OSError, SafetensorError):
            beside.parent.mkdir(parents=True, exist_ok=True)
            discard(beside)
            source = Source(checkpoint, dtype, adapter_only, average)
            notes = _WRITERS[to](source, beside)
            nbytes = _flush_with_default_mode(beside)
            swap_in(beside, out.absolute())
    except FrozenBaseError as error:
        raise UserError(
            f"{checkpoint.folder} refers to frozen weights, but {error}; give --base PATH if they were moved, or "
            "--adapter-only with --to safetensors or torch to export only the stored tensors"
        ) from None
    finally:
        discard(beside)
    if average:
        notes = (f"{len(source.averaged)} tensors are the average of {average}", *notes)
    if adapter_only:
        notes = (f"only the adapter, for frozen weights in {files}", *notes)
    elif checkpoint.base:
        notes = (f"{len(checkpoint.base)} frozen tensors are from {files}", *notes)
    return {
        "path": str(out),
        "kind": to,
        "tensors": len(source.tensors),
        "nbytes": nbytes,
        "dtype": dtype or "as stored",
        "notes": notes,
    }


def _check_options(checkpoint: Checkpoint, to: str, base: Path | None, adapter_only: bool) -> None:
    """Raises UserError for options that contradict each other or the checkpoint."""
    for option, given in (("--base", base), ("--adapter-only", adapter_only)):
        if given and not checkpoint.base:
            raise UserError(
                f"{option}: {checkpoint.folder} stores all its weights and has no frozen base; leave it out"
            )
    if adapter_only and to == "hf":
        raise UserError("--to hf writes whole models; give --adapter-only with --to safetensors or --to torch")
    if adapter_only and base:
        raise UserError("--adapter-only leaves the frozen base out, and --base says where it is; give one of them")


class Source:
    """The tensors to export; `read` reads and converts one of them."""

    def __init__(self, checkpoint: Checkpoint, dtype: str | None, adapter_only: bool, average: str | None):
        """Raises FrozenBaseError if a file of the frozen base is missing."""
        self.averaged = _averaged_tensors(checkpoint, average) if average else {}
        self.checkpoint = checkpoint
        self.tensors: dict[str, StoredTensor] = checkpoint.stored_state().model  # type: ignore[assignment]
        for name, tensor in checkpoint.base.items() if not adapter_only else ():
            tensor.files.check(tensor.source.path)
            self.tensors[name] = tensor
        self.tensors |= self.averaged
        # Buffers keep their dtype: a table of angles or a counter would be wrong if it were rounded.
        buffers = checkpoint.manifest.get("buffers")
        kept = buffers if isinstance(buffers, list) else []
        self.dtypes = {
            name: DTYPES[dtype] if dtype and tensor.dtype.is_floating_point and name not in kept else tensor.dtype
            for name, tensor in self.tensors.items()
        }
        aliases = as_dict(checkpoint.manifest.get("tied")).items()
        self.tied = {alias: name for alias, name in aliases if name in self.tensors and alias not in self.tensors}
        """Further names of tied tensors: alias → name."""

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


def _write_safetensors(source: Source, path: Path) -> tuple[str, ...]:
    """Writes one safetensors file, and returns notes for the user."""
    for name, dtype in source.dtypes.items():
        if dtype_in_files(dtype) is None:
            raise UserError(f"--to safetensors cannot hold {name}, which is {dtype_name(dtype)}; use --to torch")
    on_meta = {n: torch.empty(t.shape, dtype=source.dtypes[n], device="meta") for n, t in source.tensors.items()}
    write_safetensors(path, on_meta, source.read)  # one tensor is in memory at a time
    _compare(source, load_file(path))
    aliases = ", ".join(f"{alias} is {name}" for alias, name in source.tied.items())
    return (f"tied tensors are stored once: {aliases}",) if aliases else ()


def _write_torch(source: Source, path: Path) -> tuple[str, ...]:
    """Writes a state dict with torch.save, and returns notes for the user."""
    weights = {name: source.read(name) for name in source.tensors}
    # A stored tensor may be a view of its whole mapped file, and torch.save would write all of the view's memory.
    weights = {name: w.clone() if w.untyped_storage().nbytes() != w.nbytes else w for name, w in weights.items()}
    weights |= {alias: weights[name] for alias, name in source.tied.items()}
    try:
        torch.save(weights, path)
    except RuntimeError as error:  # what torch raises for a full disk
        raise OSError(one_line(error)) from None
    del weights
    _compare(source, torch.load(path, map_location="cpu", weights_only=True, mmap=True), source.tied)
    return ()


def _write_hf(source: Source, folder: Path) -> tuple[str, ...]:
    """Writes a folder for transformers with model and tokenizer, and returns notes for the user."""
    recipe = _recipe(source.checkpoint)
    model = build_model(recipe, source)
    text = model.config.get_text_config()
    tokens = torch.arange(min(12, getattr(text, "max_position_embeddings", None) or 12))[None] * 7 % text.vocab_size
    with _quiet_transformers() as transformers:
        expected_logits = _logits(recipe, model, tokens)
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        attention, dtype = model.config._attn_implementation, model.dtype
        del model  # frees its memory before the exported model is loaded
        if recipe.config.model.name is not None and (recipe.folder / "generation_config.json").is_file():
            shutil.copyfile(recipe.folder / "generation_config.json", folder / "generation_config.json")
        notes = _write_tokenizer(transformers, recipe, folder)
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation=attention, local_files_only=True, trust_remote_code=False
        )
        _compare(source, reloaded.state_dict(), may_have_more=True)
        logits = _logits(recipe, reloaded, tokens)
    error = ((logits - expected_logits).abs().max() / expected_logits.abs().max().clamp(min=1e-6)).item()
    if not error <= (LOGITS_TOLERANCE if dtype == torch.float32 else HALF_LOGITS_TOLERANCE):
        raise UserError(
            f"the exported model computes other logits than the checkpoint's (they differ by {error:g}); nothing was "
            "exported"
        )
    how = f"within {error:.1g} of the largest" if error else "to the bit"
    return (f"its logits equal those of the checkpoint's model {how}", *notes)


def _recipe(checkpoint: Checkpoint) -> Any:
    """Returns the recipe that a checkpoint was trained by, if it is built in and builds a model of transformers."""
    advice = "use --to safetensors or --to torch, which need no recipe"
    name, sections = built_in_recipe(checkpoint, "an export", advice)
    if not hasattr(import_recipe(name, {}), "transformers_config"):
        raise UserError(
            f"{checkpoint.folder} was trained by recipe {name}, which transformers has no model for; {advice}"
        )
    return make_recipe(name, sections)


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
    return name, sections


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
    return model.eval()


@torch.no_grad()
def _logits(recipe: Any, model: Any, tokens: Tensor) -> Tensor:
    """Returns the model's logits for some tokens."""
    return model.eval()(**recipe.inputs({"input_ids": tokens})).logits.float()


def _write_tokenizer(transformers: Any, recipe: Any, folder: Path) -> tuple[str, ...]:
    """Writes the recipe's tokenizer if it is a local one, and returns notes for the user."""
    name = recipe.config.dataset.tokenizer
    local = Path(name).expanduser()
    if name == "bytes":
        return ("no tokenizer: the model was trained on bytes, each of which is a token",)
    if not local.exists():
        return (f"no tokenizer: {name} is on the Hugging Face Hub",)
    eos = recipe.tokenizer.eos  # raises UserError if the file is not a tokenizer
    if local.is_dir():
        for file in filter(Path.is_file, map(local.joinpath, _TOKENIZER_FILES)):
            shutil.copyfile(file, folder / file.name)
    else:
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_file=str(local))
        if eos is not None:
            wrapped.eos_token = wrapped.convert_ids_to_tokens(eos)
        wrapped.save_pretrained(folder)
    if template := getattr(recipe.tokenizer, "template", None):  # the one that the model was trained with
        (folder / "chat_template.jinja").write_text(template)
    opened = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text = "The same words, before and after."
    if opened.encode(text, add_special_tokens=False) != recipe.tokenizer.encode(text).tolist():
        return (f"the tokenizer {name} was written, but transformers splits text into other tokens than shoal did",)
    return ()


@contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """Yields transformers with its progress bars off, and with DeepSpeed's log off, which it imports if installed."""
    import transformers

    bars, deepspeed = transformers.utils.logging, logging.getLogger("DeepSpeed")
    had_bars, was_disabled = bars.is_progress_bar_enabled(), deepspeed.disabled
    deepspeed.disabled = True
    bars.disable_progress_bar()
    try:
        yield transformers
    finally:
        deepspeed.disabled = was_disabled
        if had_bars:
            bars.enable_progress_bar()


def _compare(
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
        if name not in reloaded or not _same_bits(reloaded[name].to(expected.dtype), expected):
            raise UserError(f"{name} differs in the exported file; nothing was exported")
    if not may_have_more and (more := reloaded.keys() - names.keys()):
        raise UserError(f"the exported file has {min(more)!r}, which the checkpoint does not; nothing was exported")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are equal to the bit, NaN included."""
    return a.shape == b.shape and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def _check_target(out: Path, to: str, force: bool) -> None:
    """Raises UserError if `out` exists, unless `force` is set and it is an earlier export."""
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise UserError(f"{out} exists; choose another name, or give --force to replace it")
    # A folder that was given by mistake must not be lost, so only what looks like an earlier export is replaced.
    is_export_folder = (
        out.is_dir()
        and (out / "config.json").is_file()
        and all(entry.is_file() and entry.suffix in _EXPORTED_SUFFIXES for entry in out.iterdir())
    )
    if out.is_symlink() or not (is_export_folder if to == "hf" else out.is_file()):
        raise UserError(f"{out} is not an earlier export, so --force does not replace it; choose another name")


def _flush_with_default_mode(path: Path) -> int:
    """Flushes the exported files, gives them the mode of newly created files, and returns their size in bytes.

    Some libraries write files that only their owner may read.
    """
    mask = os.umask(0)
    os.umask(mask)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        file.chmod(0o666 & ~mask)
        flush(file)
    return sum(file.stat().st_size for file in files)


_WRITERS: dict[str, Callable[[Source, Path], tuple[str, ...]]] = {
    "hf": _write_hf,
    "safetensors": _write_safetensors,
    "torch": _write_torch,
}
