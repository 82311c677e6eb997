"""A checkpoint's weights for people who leave: a Hugging Face folder, one safetensors file, a plain state dict.

Each is written beside its name, opened again with the plain library, compared tensor by tensor, and only then renamed.
A checkpoint is not trusted: only recipes that are built in are asked for a model, and no code that came with it is run.
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
from shoal.checkpoint.frozen_base import BaseProblem, files_of, look_in
from shoal.checkpoint.inspect import open_step
from shoal.checkpoint.latest import check_same_model
from shoal.checkpoint.pieces import StoredTensor, write_safetensors
from shoal.checkpoint.store import Checkpoint, unflatten
from shoal.config.run import RECIPE_SECTIONS, RECIPES, check_run, import_recipe
from shoal.errors import UserError, one_line
from shoal.tensors import DTYPES, replace_parameters, tensors_with_names
from shoal.weights import parameters_on_meta

SHARD_SIZE = "5GB"
SAME_OUTPUT = {torch.float32: 1e-4}
SAME_HALF_OUTPUT = 2e-2
"""How far the logits of a reloaded model may be off, of their largest: it may sum in another order, not more."""
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
) -> dict[str, Any]:
    """Writes the weights of a checkpoint to `out`, in `dtype` (as stored, unless given), and proves that they are.

    Frozen weights that it refers to are read where they were, or in `base`; `adapter_only` leaves them out. Returns
    what `shoal checkpoint export --json` prints.
    """
    for option, value, choices in (("--to", to, _WRITERS), ("--dtype", dtype or "fp32", DTYPES)):
        if value not in choices:
            raise UserError(f"{option} {value} is not one of {', '.join(choices)}")
    checkpoint = open_step(step_dir)
    _check_options(checkpoint, to, base, adapter_only)
    _check_place(out, to, force)
    if out.resolve().is_relative_to(step_dir.resolve()):
        raise UserError(f"{out} is inside the checkpoint, which nothing may be added to; choose another place")
    if base:
        checkpoint = replace(checkpoint, base=look_in(base, checkpoint.base))
    files = ", ".join(files_of(checkpoint.base))
    beside = out.absolute().with_name(f".{out.absolute().name}.part")
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        discard(beside)
        source = Source(checkpoint, dtype, adapter_only)
        notes = _WRITERS[to](source, beside)
        nbytes = _settle(beside)
        swap_in(beside, out.absolute())
    except BaseProblem as problem:
        raise UserError(
            f"{checkpoint.folder} refers to frozen weights, and {problem}; give --base PATH if they are elsewhere, or "
            "--adapter-only with --to safetensors or torch for what the checkpoint itself holds"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {error}") from None
    finally:
        discard(beside)
    if checkpoint.base:
        whole = f"{len(checkpoint.base)} frozen tensors are from {files}"
        notes = (f"the adapter alone, to frozen weights in {files}" if adapter_only else whole, *notes)
    facts = {"path": str(out), "kind": to, "tensors": len(source.tensors), "nbytes": nbytes}
    return {**facts, "dtype": dtype or "as stored", "notes": notes}


def _check_options(checkpoint: Checkpoint, to: str, base: Path | None, adapter_only: bool) -> None:
    for option, given in (("--base", base), ("--adapter-only", adapter_only)):
        if given and not checkpoint.base:
            raise UserError(f"{checkpoint.folder} holds all its weights and refers to no base; leave {option} out")
    if adapter_only and to == "hf":
        raise UserError("--to hf writes whole models; give --adapter-only with --to safetensors or --to torch")
    if adapter_only and base:
        raise UserError("--adapter-only leaves the base out, and --base says where it is; give one of them")


class Source:
    """A checkpoint's weights, each read and converted when asked for."""

    def __init__(self, checkpoint: Checkpoint, dtype: str | None, adapter_only: bool):
        """Raises BaseProblem if a file of the base is missing."""
        self.checkpoint = checkpoint
        self.tensors: dict[str, StoredTensor] = unflatten(checkpoint.tensors).model  # type: ignore[assignment]
        for name, tensor in checkpoint.base.items() if not adapter_only else ():
            tensor.files.check(tensor.source.path)
            self.tensors[name] = tensor
        tied, buffers = (checkpoint.manifest.get(key) for key in ("tied", "buffers"))
        # Tables that a model keeps as buffers stay as they are: rounded, they would be other tables.
        kept = buffers if isinstance(buffers, list) else []
        self.dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        if dtype:
            floats = (name for name, d in self.dtypes.items() if d.is_floating_point and name not in kept)
            self.dtypes |= dict.fromkeys([*floats], DTYPES[dtype])
        aliases = tied.items() if isinstance(tied, dict) else ()
        self.tied = {alias: name for alias, name in aliases if name in self.tensors and alias not in self.tensors}
        """Other names of tensors that are there: alias → name."""

    def read(self, name: str) -> Tensor:
        stored = self.tensors[name].read()
        tensor = stored.to(self.dtypes[name])
        if tensor.dtype == torch.float16 and not tensor.isfinite().all() and stored.isfinite().all():
            raise UserError(f"--dtype fp16 cannot hold {name}, whose values go up to {stored.abs().max():g}; use bf16")
        return tensor


def _write_safetensors(source: Source, path: Path) -> tuple[str, ...]:
    shapes = {n: torch.empty(t.shape, dtype=source.dtypes[n], device="meta") for n, t in source.tensors.items()}
    write_safetensors(path, shapes, source.read)  # one in memory at a time
    _compare(source, load_file(path))
    aliases = ", ".join(f"{alias} is {name}" for alias, name in source.tied.items())
    return (f"tied, so there once: {aliases}",) if aliases else ()


def _write_torch(source: Source, path: Path) -> tuple[str, ...]:
    weights = {name: source.read(name) for name in source.tensors}
    # A piece is a view of its whole file, and torch.save would write all that a view's memory holds.
    weights = {name: w.clone() if w.untyped_storage().nbytes() != w.nbytes else w for name, w in weights.items()}
    weights |= {alias: weights[name] for alias, name in source.tied.items()}
    try:
        torch.save(weights, path)
    except RuntimeError as error:  # torch's word for a full disk
        raise OSError(one_line(error)) from None
    del weights
    _compare(source, torch.load(path, map_location="cpu", weights_only=True, mmap=True), source.tied)
    return ()


def _write_hf(source: Source, folder: Path) -> tuple[str, ...]:
    recipe = _recipe(source.checkpoint)
    model = _build(recipe, source)
    text = model.config.get_text_config()
    tokens = torch.arange(min(12, getattr(text, "max_position_embeddings", None) or 12))[None] * 7 % text.vocab_size
    with _quiet_transformers() as transformers:
        expected = _logits(recipe, model, tokens)
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        attention, dtype = model.config._attn_implementation, model.dtype
        del model  # never two of them in memory
        if recipe.config.model.name is not None and (recipe.folder / "generation_config.json").is_file():
            shutil.copyfile(recipe.folder / "generation_config.json", folder / "generation_config.json")
        notes = _write_tokenizer(transformers, recipe, folder)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation=attention, local_files_only=True, trust_remote_code=False
        )
        _compare(source, again.state_dict(), may_have_more=True)
        found = _logits(recipe, again, tokens)
    apart = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
    if not apart <= SAME_OUTPUT.get(dtype, SAME_HALF_OUTPUT):
        raise UserError(
            f"the exported model computes something else than the checkpoint's (logits differ by {apart:g})"
        )
    how = f"but for {apart:.1g} of the largest" if apart else "to the bit"
    return (f"its logits are those of the checkpoint's model, {how}", *notes)


def _recipe(checkpoint: Checkpoint) -> Any:
    """Returns the recipe that a checkpoint was trained by, if it is built in and builds a model of transformers.

    A manifest is not trusted: a name in it is looked up in `RECIPES` and never imported.
    """
    config = checkpoint.manifest.get("config")
    config = config if isinstance(config, dict) else {}
    name, advice = config.get("recipe"), "use --to safetensors or --to torch, which need no recipe"
    if not isinstance(name, str) or name not in RECIPES:
        trainer = f"by recipe {name!r}, which is not built in" if name else "without a recipe"
        raise UserError(
            f"{checkpoint.folder} was trained {trainer}, and an export runs no code that a checkpoint names; {advice}"
        )
    if not hasattr(import_recipe(name, {}), "transformers_config"):
        raise UserError(
            f"{checkpoint.folder} was trained by recipe {name}, which transformers has no model for; {advice}"
        )
    sections = {key: config[key] for key in RECIPE_SECTIONS if isinstance(config.get(key), dict)}
    if sections.get("model", {}).get("trust_remote_code"):
        raise UserError(
            f"{checkpoint.folder} asks for model code that came with other weights (model.trust_remote_code), which an "
            f"export does not run; {advice}"
        )
    run = check_run({"recipe": name, "training": {"max_steps": 1, "batch_size": 1}, **sections})
    return run.recipe_type(run.recipe_config)


def _build(recipe: Any, source: Source) -> Any:
    """The recipe's model with the checkpoint's weights. A config may lie: nothing is kept before shapes agree."""
    try:
        with parameters_on_meta():
            model = recipe.build_model()
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"the model in the config of {source.checkpoint.folder} cannot be built: {one_line(error)}"
        ) from None
    named = [*tensors_with_names(model)]
    shapes = {names[0]: [*tensor.shape] for tensor, names in named}
    check_same_model(source.checkpoint, shapes, "its config was changed, so --to safetensors is what is left")
    first_names = {id(tensor): names[0] for tensor, names in named}
    replace_parameters(model, lambda p: nn.Parameter(source.read(first_names[id(p)]).clone(), requires_grad=False))
    for buffer in model.buffers():
        if id(buffer) in first_names:
            buffer.copy_(source.read(first_names[id(buffer)]))
    return model.eval()


@torch.no_grad()
def _logits(recipe: Any, model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model.eval()(**recipe.inputs({"input_ids": tokens})).logits.float()
    return logits


def _write_tokenizer(transformers: Any, recipe: Any, folder: Path) -> tuple[str, ...]:
    name = recipe.config.dataset.tokenizer
    local = Path(name).expanduser()
    if name == "bytes":
        return ("no tokenizer: it was trained on bytes, each its own token",)
    if not local.exists():
        return (f"no tokenizer: {name} is on the Hugging Face Hub",)
    eos = recipe.tokenizer.eos  # refuses what is no tokenizer
    if local.is_dir():
        for file in (file for file in _TOKENIZER_FILES if (local / file).is_file()):
            shutil.copyfile(local / file, folder / file)
    else:
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_file=str(local))
        if eos is not None:
            wrapped.eos_token = wrapped.convert_ids_to_tokens(eos)
        wrapped.save_pretrained(folder)
    opened = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    words = "The same words, before and after."
    if opened.encode(words, add_special_tokens=False) != recipe.tokenizer.encode(words).tolist():
        return (f"the tokenizer of {name} is there, but transformers splits words otherwise than shoal did",)
    return ()


@contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """The package, without its progress bars, and without the words of DeepSpeed, which it imports if that is there."""
    import transformers

    bars, deepspeed = transformers.utils.logging, logging.getLogger("DeepSpeed")
    shown, heard = bars.is_progress_bar_enabled(), deepspeed.disabled
    deepspeed.disabled = True
    bars.disable_progress_bar()
    try:
        yield transformers
    finally:
        deepspeed.disabled = heard
        if shown:
            bars.enable_progress_bar()


def _compare(
    source: Source,
    reloaded: Mapping[str, Tensor],
    aliases: Mapping[str, str] | None = None,
    may_have_more: bool = False,
) -> None:
    """Every tensor as it was, to the bit, and no other. A library may widen what it opens."""
    names = {**{name: name for name in source.tensors}, **(aliases or {})}
    for name, stored_name in names.items():
        expected = source.read(stored_name)
        if name not in reloaded or not _same_bits(reloaded[name].to(expected.dtype), expected):
            raise UserError(f"{name} did not come back from the exported file as it was; nothing was exported")
    if not may_have_more and (more := reloaded.keys() - names.keys()):
        raise UserError(f"the exported file has {min(more)!r}, which the checkpoint has not; nothing was exported")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def _check_place(out: Path, to: str, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise UserError(f"{out} exists; choose another name, or give --force to replace it")
    # A folder given by mistake must not be lost: only what looks like an earlier export is replaced.
    like_an_export = (
        out.is_dir()
        and (out / "config.json").is_file()
        and all(entry.is_file() and entry.suffix in _EXPORTED_SUFFIXES for entry in out.iterdir())
    )
    if out.is_symlink() or not (like_an_export if to == "hf" else out.is_file()):
        raise UserError(f"{out} is not an earlier export, so --force does not replace it; choose another name")


def _settle(path: Path) -> int:
    """Flushes what was written, and makes it as open as other files; its size in bytes."""
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
