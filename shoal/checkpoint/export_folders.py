"""Writes the model of a checkpoint as a folder for transformers, or its adapter as a folder for PEFT.

Each is opened again by the library that others will use, and must compute the logits of the checkpoint's model.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.checkpoint.inspect import as_dict
from shoal.checkpoint.store import Checkpoint
from shoal.checkpoint.trained_model import Source, build_model, built_in_recipe, compare, make_recipe, same_bits
from shoal.config.run import import_recipe
from shoal.errors import UserError
from shoal.lora.adapters import (
    has_adapters,
    is_adapter_tensor,
    merge_adapters,
    merged_bias,
    merged_weight,
    remove_adapters,
    untie_adapted,
)
from shoal.lora.layers import LowRankLayer
from shoal.lora.peft_folder import config_for_peft, name_in_folder, write_adapter
from shoal.lora.trained_tokens import token_indices
from shoal.quantised import FourBit, dequantise, quantised_layers
from shoal.tensors import DTYPES
from shoal.weights.conversion import open_safetensors

SHARD_SIZE = "5GB"
MERGE_INTO = ("original", "dequantised")
LOGITS_TOLERANCE, HALF_LOGITS_TOLERANCE = 1e-4, 5e-2
"""How much the logits of the reloaded model may differ, relative to the largest: it may add up in another order. In
half precision that is up to a few percent, on some CPUs more than on others. Tensors are compared to the bit."""
WITHOUT_BITS = " with its base dequantised"
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


def write_hf(source: Source, folder: Path) -> tuple[str, ...]:
    """Writes a folder for transformers with model and tokenizer, and returns notes for the user."""
    recipe = _recipe(source.checkpoint)
    model = build_model(recipe, source)
    tokens, quantised, trained_dtype = _some_tokens(model), bool(quantised_layers(model)), model.dtype
    notes: tuple[str, ...] = ()
    with _quiet_transformers() as transformers:
        expected_logits, merged = _dequantised_logits(recipe, model, tokens), None
        if has_adapters(model):
            notes = (f"adapters are merged into the {source.merge_into} weights",)
            if quantised:
                notes += (_compare_merges(recipe, model, source, tokens),)
            if untied := untie_adapted(model):
                notes += (f"{untied} has weights of its own now: its adapter is not that of the module it was tied to",)
            merged = _merge(model, source, recipe.config.model.dtype)
            if quantised and source.merge_into == "original":  # another model than the one that was trained
                expected_logits = _logits(recipe, model, tokens)
        vars(model).pop("save_pretrained", None)  # what refuses adapters that are not merged
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        source.num_written = sum(len(open_safetensors(file).keys()) for file in folder.glob("*.safetensors"))
        attention, dtype = model.config._attn_implementation, model.dtype
        del model  # frees its memory before the exported model is loaded
        if recipe.config.model.name is not None and (recipe.folder / "generation_config.json").is_file():
            shutil.copyfile(recipe.folder / "generation_config.json", folder / "generation_config.json")
        notes += _write_tokenizer(transformers, recipe, folder)
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation=attention, local_files_only=True, trust_remote_code=False
        )
        if merged is None:
            compare(source, reloaded.state_dict(), may_have_more=True)
        elif (differs := _first_difference(merged, reloaded.state_dict())) is not None:
            raise UserError(f"{differs} differs in the exported file; nothing was exported")
        logits = _logits(recipe, reloaded, tokens)
    how = _compare_logits(logits, expected_logits, trained_dtype, dtype)
    is_other_model = quantised and source.merge_into == "original"
    whose = "of the merged model" if is_other_model else f"of the checkpoint's model{WITHOUT_BITS * quantised}"
    rounded = f", with weights rounded to {source.dtype}," if source.dtype and not notes else ""
    return (f"its logits equal those {whose}{rounded} {how}", *notes)


def _compare_merges(recipe: Any, model: Any, source: Source, tokens: Tensor) -> str:
    """Returns how far the logits of both kinds of merged models are from those of the trained one, whose base is
    quantised. One merged matrix is in memory at a time."""
    trained, found = _logits(recipe, model, tokens), []
    for kind in MERGE_INTO:
        if kind == "original" and not source.has_originals(f"{name}.weight" for name in quantised_layers(model)):
            continue
        with _computing_merged(model, source if kind == "original" else None):
            difference = (_logits(recipe, model, tokens) - trained).abs().max() / trained.abs().max().clamp(min=1e-6)
        found.append(f"{difference:.1%} of the largest logit with --merge-into {kind}")
    return f"logits differ from those of the trained model, whose base is quantised, by {' and by '.join(found)}"


@contextmanager
def _computing_merged(model: Any, originals: Source | None = None) -> Iterator[None]:
    """Makes each quantised layer multiply with one matrix: what its weight stands for, or the original that was
    quantised, with its adapter merged."""
    layers = quantised_layers(model)
    for name, layer in layers.items():
        layer.original = originals.original(f"{name}.weight") if originals is not None else None
        layer.forward = partial(_forward_merged, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers.values():
            layer.original = None
            del layer.forward


def _forward_merged(layer: Any, x: Tensor) -> Tensor:
    """Computes a quantised layer with its weight and its adapter merged."""
    adapted = isinstance(layer, LowRankLayer)
    weight = merged_weight(layer) if adapted else layer.dequantise()
    bias = merged_bias(layer) if adapted else layer.bias
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _merge(model: Any, source: Source, model_dtype: str | None) -> dict[str, Tensor]:
    """Merges adapters into a model, converts all parameters to one dtype, and returns its tensors.

    `--merge-into` makes no difference to weights that are not quantised.
    """
    layers = quantised_layers(model)
    for name, layer in layers.items() if source.merge_into == "original" else ():
        layer.original = source.original(f"{name}.weight")
    if not layers:
        model.float()
    merge_adapters(model)
    dequantise(model)  # layers without an adapter
    # transformers opens a model in one dtype, and merged layers are float32
    dtype = DTYPES[source.dtype or ("fp32" if layers else model_dtype or "fp32")]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return dict(model.state_dict())


def write_peft(source: Source, folder: Path) -> tuple[str, ...]:
    """Writes an adapter as PEFT does, opens it with PEFT on the frozen base, and returns notes for the user."""
    checkpoint, recipe = source.checkpoint, _recipe(source.checkpoint)
    if getattr(recipe.config, "lora", None) is None:
        raise UserError(f"--to peft: {checkpoint.folder} was trained without lora: and has no adapter; use --to hf")
    try:
        import peft
    except ImportError:
        raise UserError("--to peft: the package peft is missing; run `pip install shoal[hf]`") from None
    model = build_model(recipe, source)
    tokens, dtype, quantised = _some_tokens(model), model.dtype, bool(quantised_layers(model))
    tensors, trained_tokens = _trained_for_peft(model, source), token_indices(model)
    source.num_written = len(tensors)
    with _quiet_transformers() as transformers:
        expected_logits = _dequantised_logits(recipe, model, tokens)
        remove_adapters(model)
        if quantised:
            dequantise(model, model.dtype)  # PEFT knows bitsandbytes' own layers alone
        section = recipe.config.model
        local = Path(section.name or "").expanduser()
        base = str(local.absolute()) if section.name and local.is_dir() else section.name
        digests = {name: tensor.source.sha256 for name, tensor in checkpoint.base.items()}
        config = config_for_peft(model, recipe.config.lora, base, section.revision, trained_tokens)
        write_adapter(folder, tensors, config, digests, recipe.added_tokens)
        notes = _write_tokenizer(transformers, recipe, folder)
        if base is None:
            notes += (
                "adapter_config.json names no base, because the model was built from model.config; write the folder of "
                "its weights into base_model_name_or_path",
            )
        if quantised:
            notes += (f"to compute as in the training, load the base with {_bitsandbytes_config(checkpoint, recipe)}",)
        if recipe.added_tokens:
            rows = len(model.get_input_embeddings().weight)
            notes += (
                f"the model has new tokens: open it with AutoPeftModelForCausalLM, or with PeftModel after "
                f"base.resize_token_embeddings({rows})",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a base without a name, and about tied weights
            reloaded = peft.PeftModel.from_pretrained(model, str(folder))
        found = peft.get_peft_model_state_dict(reloaded, save_embedding_layers=False)
        if (differs := _first_difference(tensors, found)) is not None:
            raise UserError(f"{differs} is another tensor when PEFT has read it; nothing was exported")
        logits = _logits(recipe, reloaded, tokens)
    how = _compare_logits(logits, expected_logits, dtype)
    whose = f"the checkpoint's model{WITHOUT_BITS * quantised}"
    return (f"opened by PEFT, its logits equal those of {whose} {how}", *notes)


def _bitsandbytes_config(checkpoint: Checkpoint, recipe: Any) -> str:
    """Returns the call of transformers that quantises a base as this run did."""
    scheme = recipe.scheme
    if not isinstance(scheme, FourBit):
        return f"BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold={scheme.threshold})"
    precision = as_dict(as_dict(checkpoint.manifest.get("config")).get("training")).get("mixed_precision")
    compute = scheme.compute or {"bf16": "bfloat16", "fp16": "float16"}.get(str(precision), "float32")
    options = f"bnb_4bit_quant_type={scheme.quant_type!r}, bnb_4bit_use_double_quant={scheme.double}"
    return f"BitsAndBytesConfig(load_in_4bit=True, {options}, bnb_4bit_compute_dtype=torch.{compute})"


def _trained_for_peft(model: Any, source: Source) -> dict[str, Tensor]:
    """Returns what was trained, as the checkpoint has it, by PEFT's names. PEFT wants a module that is trained as a
    whole under the name of the one that it is tied to, too."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and not (id(parameter) in names and is_adapter_tensor(name)):
            names.setdefault(id(parameter), []).append(name)
    found = {}
    for first, *others in names.values():
        found[name_in_folder(model, first)] = tensor = source.read(first)
        found |= {name_in_folder(model, name): tensor.clone() for name in others}  # the file has no ties
    return found


def _some_tokens(model: Any) -> Tensor:
    """Returns a few tokens, to compare the logits of two models with."""
    text = model.config.get_text_config()
    return torch.arange(min(12, getattr(text, "max_position_embeddings", None) or 12))[None] * 7 % text.vocab_size


def _compare_logits(logits: Tensor, expected: Tensor, *dtypes: torch.dtype) -> str:
    """Returns how near the logits of an exported model are. Raises UserError if they are others. `dtypes` are those
    that the two models computed in."""
    error = ((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
    is_half = any(dtype != torch.float32 for dtype in dtypes)
    if not error <= (HALF_LOGITS_TOLERANCE if is_half else LOGITS_TOLERANCE):
        raise UserError(
            f"the exported model computes other logits than the checkpoint's (they differ by {error:g}); nothing was "
            "exported"
        )
    return f"within {error:.1g} of the largest logit" if error else "to the bit"


def _first_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """Returns the first name whose tensor is missing or differs in its bits, or None. A library may load it in another
    dtype, such as that of the base."""
    for name, tensor in expected.items():
        if name not in found:
            return name
        dtype = min(tensor.dtype, found[name].dtype, key=lambda dtype: dtype.itemsize)
        if not same_bits(found[name].to(dtype), tensor.to(dtype)):
            return name
    return None


def _recipe(checkpoint: Checkpoint) -> Any:
    """Returns the recipe that a checkpoint was trained by, if it is built in and builds a model of transformers."""
    advice = "use --to safetensors or --to torch, which need no recipe"
    name, sections = built_in_recipe(checkpoint, "an export", advice)
    if not hasattr(import_recipe(name, {}), "transformers_config"):
        raise UserError(
            f"{checkpoint.folder} was trained by recipe {name}, which transformers has no model for; {advice}"
        )
    return make_recipe(name, sections)


def _dequantised_logits(recipe: Any, model: Any, tokens: Tensor) -> Tensor:
    """Returns the logits that a model has with its base dequantised, as an exported model computes them: a layer in 8
    bits also rounds its inputs, and one in 4 bits may compute in another dtype than the model."""
    with _computing_merged(model):
        return _logits(recipe, model, tokens)


@torch.no_grad()
def _logits(recipe: Any, model: Any, tokens: Tensor) -> Tensor:
    """Returns the model's logits for some tokens."""
    return model.eval()(**recipe.inputs({"input_ids": tokens})).logits.float()


def _write_tokenizer(transformers: Any, recipe: Any, folder: Path) -> tuple[str, ...]:
    """Writes the recipe's tokenizer if it is a local one or has new tokens, and returns notes for the user."""
    name, added = recipe.config.dataset.tokenizer, recipe.added_tokens
    local = Path(name).expanduser()
    if name == "bytes":
        return ("no tokenizer: the model was trained on bytes, each of which is a token",)
    if not local.exists() and not added:
        return (f"no tokenizer: {name} is on the Hugging Face Hub",)
    eos = recipe.tokenizer.eos  # raises UserError if the file is not a tokenizer
    if local.is_dir() and not added:
        for file in filter(Path.is_file, map(local.joinpath, _TOKENIZER_FILES)):
            shutil.copyfile(file, folder / file.name)
    else:
        if local.is_file():
            wrapped = transformers.PreTrainedTokenizerFast(tokenizer_file=str(local))
            if eos is not None:
                wrapped.eos_token = wrapped.convert_ids_to_tokens(eos)
        else:
            options = {} if local.is_dir() else {"revision": recipe.config.model.revision or "main"}
            wrapped = transformers.AutoTokenizer.from_pretrained(str(local) if local.is_dir() else name, **options)
        recipe.add_tokens(wrapped)
        wrapped.save_pretrained(folder)
    if template := getattr(recipe.tokenizer, "template", None):  # the one that the model was trained with
        (folder / "chat_template.jinja").write_text(template)
    if tool_template := getattr(recipe.tokenizer, "tool_template", None):
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_template)
    opened = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text = "The same words, before and after." + "".join(added)
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
