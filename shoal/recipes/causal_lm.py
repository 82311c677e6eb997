"""Any causal language model of Hugging Face transformers: from scratch by its configuration, or from its weights."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from shoal.data import TextDataset
from shoal.data.hub import hub, snapshot
from shoal.errors import UserError
from shoal.models.causal_attention import use_causal_attention
from shoal.recipes.recipe import token_loss
from shoal.recipes.text import TextRecipe
from shoal.recipes.transformers_private import file_sources
from shoal.tensors import tensors_with_names
from shoal.types import ParallelPlan, TensorStyle, Weights
from shoal.weights import parameters_on_meta
from shoal.weights.conversion import open_files

PREVIEW_TOKENS = 240
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Older spellings that transformers moves into `rope_parameters`.
_ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor")
# Training never caches, and its loss is the cross-entropy alone.
_WITHOUT_EFFECT = ("use_cache", "output_router_logits", "router_aux_loss_coef")


class CausalLMConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    name: str | None = None
    """Start from these weights: a folder that transformers saved, or a repository on the Hugging Face Hub."""
    config: dict[str, Any] | None = None
    """Start from scratch: `model_type` and the keys of its transformers configuration."""
    revision: str | None = None
    """With a `name` on the Hub: its branch, tag or commit."""
    trust_remote_code: bool = False
    """With a `name`: run the model code that comes with the weights."""
    attn_implementation: Literal["eager", "sdpa"] | None = None
    """Default: what transformers chooses for the model."""

    @model_validator(mode="after")
    def _one_source(self) -> CausalLMConfig:
        if (self.name is None) == (self.config is None):
            both = "both are given; leave one out" if self.name else "neither is given"
            raise UserError(f"model: name (weights to start from) or config (from scratch), but {both}")
        if self.config is not None:
            for key in ("revision", "trust_remote_code"):
                if getattr(self, key):
                    raise UserError(f"model.{key}: {getattr(self, key)!r} has no use with model.config; leave it out")
            _check_keys(self.config)
        elif self.revision is not None and _is_local(self.name or ""):
            raise UserError(f"model.revision: {self.revision!r} has no use with the folder {self.name}; leave it out")
        return self


class CausalLMRecipe(TextRecipe):
    """Trains a `transformers` model on text."""

    class Config(BaseModel):
        model: CausalLMConfig = Field(default_factory=CausalLMConfig)
        dataset: TextDataset = TextDataset()

        @model_validator(mode="before")
        @classmethod
        def _tokenizer_of_the_model(cls, given: Any) -> Any:
            """Weights know the tokens of one tokenizer, which is theirs unless another is named."""
            model, dataset = given.get("model") or {}, given.get("dataset") or {}
            if isinstance(model, dict) and isinstance(dataset, dict) and isinstance(name := model.get("name"), str):
                return {**given, "dataset": {"tokenizer": name, **dataset}}
            return given

    def prepare_data(self) -> None:
        model, dataset = self.config.model, self.config.dataset
        if model.name is not None:
            _fetch(model)
            self.files  # noqa: B018  # refuses what cannot be read before the text is prepared
        text_config = self.transformers_config.get_text_config()
        key = "model.config.vocab_size" if model.config is not None else f"the vocabulary of model.name {model.name!r}"
        self.check_vocabulary(key, text_config.vocab_size)
        longest = _max_positions(text_config)
        if longest is not None and dataset.seq_length > longest:
            raise UserError(
                f"dataset.seq_length = {dataset.seq_length}, but the model has max_position_embeddings = {longest}; "
                + ("raise it in model.config" if model.config is not None else f"use {longest} or less")
            )
        super().prepare_data()

    @cached_property
    def folder(self) -> Path:
        """Where the weights are; `prepare_data` has fetched them."""
        return _fetch(self.config.model, local_only=True)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        return safetensors_in(self.folder)

    @cached_property
    def transformers_config(self) -> Any:
        model = self.config.model
        if model.config is None:
            with hub("model.name", model.name, "transformers", local=True) as transformers:
                try:
                    config = transformers.AutoConfig.from_pretrained(
                        str(self.folder), trust_remote_code=model.trust_remote_code
                    )
                except ValueError as error:
                    if "trust_remote_code" not in str(error):
                        raise
                    raise UserError(
                        f"model.name: {model.name!r} comes with model code of its own; if you trust it, "
                        "set model.trust_remote_code: true"
                    ) from error
            if method := getattr(config, "quantization_config", None):
                method = method if isinstance(method, dict) else method.to_dict()
                raise UserError(
                    f"model.name: the weights of {model.name!r} are quantised ({method.get('quant_method')}), which "
                    "recipe causal_lm cannot train; use the ones they were made from"
                )
            return config
        keys = dict(model.config)
        if "vocab_size" in _known_keys(keys["model_type"]):
            keys.setdefault("vocab_size", self.tokenizer.vocab_size)
            # Those of the class belong to another vocabulary. A padding token would even be one that is never learnt.
            special = {key: None for key in _SPECIAL_TOKENS if key in _known_keys(keys["model_type"])}
            keys = {**special, "eos_token_id": self.tokenizer.eos, **keys}
        return _make_config(keys)

    def build_model(self) -> nn.Module:
        section, options = self.config.model, {}
        if section.attn_implementation:
            options["attn_implementation"] = section.attn_implementation
        try:
            model: nn.Module = _transformers().AutoModelForCausalLM.from_config(
                self.transformers_config,
                dtype=torch.float32,
                trust_remote_code=section.trust_remote_code,
                **options,
            )
        except (ValueError, ImportError) as error:
            source = f"model.name = {section.name!r}" if section.name else "model.config"
            raise UserError(f"{source} cannot be built: {_one_line(error)}") from error
        if getattr(self.transformers_config, "is_decoder", None) is False and not _has_causal_attention(model):
            raise UserError(
                f"model.config.model_type = {self.transformers_config.model_type!r} looks at the tokens it should "
                "predict unless model.config.is_decoder is true; set it"
            )
        if section.attn_implementation is None:
            use_causal_attention(model)
        return model

    def weights(self) -> Weights:
        if self.config.model.name is None:
            return Weights("init", reset=draw)
        files = open_files(self.files)
        with parameters_on_meta():
            model = self.build_model()
        sources = file_sources(model, files)
        missing = next((names[0] for _, names in tensors_with_names(model) if sources.keys().isdisjoint(names)), None)
        if missing is not None:
            raise UserError(
                f"model.name = {self.config.model.name!r}: its files have no tensor {missing!r} (they have "
                f"{min(files, default='none')!r}): they hold a base model without its head, or another model; "
                "save the whole model by AutoModelForCausalLM and save_pretrained"
            )
        return Weights("files", files=self.files, sources=sources)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
        return {"input_ids": batch["input_ids"], "use_cache": False, **positions}

    def split_sequence(self, batch: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
        length = batch["input_ids"].shape[1]
        if length % parts:
            raise UserError(f"distributed.mesh.cp = {parts} does not divide sequences of {length} tokens")
        part = slice(index * length // parts, (index + 1) * length // parts)
        positions = torch.arange(length, device=batch["input_ids"].device)[None, part]
        return {**{key: batch[key][:, part] for key in ("input_ids", "labels")}, "position_ids": positions}

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        return token_loss(output.logits, batch["labels"])

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        blocks = tuple(_blocks(model)) or super().parallel_plan(model).blocks
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        embed = next((name for name, module in model.named_modules() if module is embedding), None)
        head = _head(model)
        order = _order(model, blocks)
        tensor = _tensor_styles(model, blocks, head)
        return ParallelPlan(blocks, embed, head, order, "input_ids" if order else None, tensor)

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Before a model from the Hub is there, only what is in the config is known."""
        if self.config.model.config is None:
            return
        config = _make_config(self.config.model.config).get_text_config()
        tp, cp = (sizes.get(side, 1) for side in ("tp", "cp"))
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, key, None)
            for side, ranks in (("tp", tp), ("tp × cp", tp * cp)):
                if heads and heads % ranks:
                    raise UserError(f"distributed.mesh: {side} = {ranks} does not divide model.config.{key} = {heads}")
        length = self.config.dataset.seq_length
        if length % cp:
            raise UserError(f"distributed.mesh.cp = {cp} does not divide dataset.seq_length = {length}")

    def num_blocks(self) -> int | None:
        if self.config.model.config is None:
            return None
        layers: int = _make_config(self.config.model.config).get_text_config().num_hidden_layers
        return layers

    def preview(self, model: nn.Module) -> str:
        """How the model goes on from the first words it was not trained on.

        Every rank has to call the model as often, so nothing ends a text early.
        """
        config: Any = model.config
        prompt = self.prompt(model)
        room = (_max_positions(config.get_text_config()) or 1 << 30) - prompt.shape[1]
        length = min(PREVIEW_TOKENS, room)
        if length < 1:
            return self.tokenizer.decode(prompt[0].tolist())
        unknown = list(range(self.tokenizer.vocab_size, config.get_text_config().vocab_size))
        generation: Any = model.generate
        (tokens,) = generation(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
            suppress_tokens=unknown or None,
        ).tolist()
        return self.tokenizer.decode(tokens)


def draw(model: nn.Module, module: nn.Module) -> None:
    """The initialisation of transformers for the parameters of one module, and for nothing else.

    A parent may draw again what its child drew (GPT-2's projections into the residual stream), so all of a module's
    ancestors have their turn; transformers leaves alone what is marked as initialised.
    """
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter._is_hf_initialized = id(parameter) not in own
    try:
        with torch.no_grad():
            for member, owner in _lineage(model, module):
                owner._init_weights(member)
    finally:
        for parameter in parameters:
            del parameter._is_hf_initialized


def safetensors_in(folder: Path) -> tuple[Path, ...]:
    """The files of weights in a folder that transformers saved."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise UserError(f"model.name: {index} is damaged") from None
        for name in names:
            if not (folder / name).is_file() or Path(name).name != name:
                raise UserError(f"model.name: {index} names {name!r}, which is not in {folder}")
        return tuple(folder / name for name in names)
    if single.exists():
        return (single,)
    pickles = any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir())
    what = "only pickles, which may hold code and are not opened" if pickles else "no weights"
    raise UserError(f"model.name: {folder} has {what}; save the model as model.safetensors")


def _fetch(section: CausalLMConfig, local_only: bool = False) -> Path:
    name = section.name or ""
    if _is_local(name):
        return Path(name).expanduser()
    if name.startswith(("/", ".", "~")):
        raise UserError(f"model.name: there is no folder {name}")
    patterns = ["model*.safetensors", "*.json", *(["*.py"] if section.trust_remote_code else [])]
    return snapshot("model.name", name, section.revision, patterns, local_only=local_only)


def _is_local(name: str) -> bool:
    return Path(name).expanduser().is_dir()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("recipe causal_lm needs the package transformers; run `pip install shoal[hf]`") from None
    return transformers


def _config_class(model_type: Any) -> Any:
    mapping = _transformers().CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    if model_type not in causal or model_type not in mapping:
        nearest = get_close_matches(str(model_type), causal, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "llama, qwen3 and gpt2 are some"
        raise UserError(f"model.config.model_type = {model_type!r} is not a causal language model; {hint}")
    return mapping[model_type]


def _known_keys(model_type: str) -> set[str]:
    """What a model's own configuration class declares. Those all classes share are about tasks and storage."""
    made = _config_class(model_type)
    shared = {field.name for field in dataclasses.fields(_transformers().PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(made)} - shared
    return own | set(made.attribute_map) | set(_ROPE_KEYS if "rope_parameters" in own else ())


def _check_keys(given: dict[str, Any]) -> None:
    """transformers keeps keys it does not know and does nothing with them."""
    if "model_type" not in given:
        raise UserError("model.config.model_type is missing: say which kind of model, such as llama")
    known = _known_keys(given["model_type"])
    for key in given:
        if key in known and key in _WITHOUT_EFFECT:
            raise UserError(f"model.config.{key} has no effect in recipe causal_lm; leave it out")
        if key != "model_type" and key not in known:
            nearest = get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean model.config.{nearest[0]}?" if nearest else f"it has {', '.join(sorted(known))}"
            raise UserError(f"model.config.{key} is not a key of a {given['model_type']}; {hint}")
    _make_config(given)


def _make_config(keys: dict[str, Any]) -> Any:
    values = {key: value for key, value in keys.items() if key != "model_type"}
    try:
        return _config_class(keys["model_type"])(**values)
    except Exception as error:  # their validators raise many kinds
        raise UserError(f"model.config: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    # "Validation error for field 'x': TypeError: Field 'x' expected …": the last part says it all.
    return re.sub(r"^.*?\b(?:Type|Value)Error: ", "", text)[:300]


def _max_positions(text_config: Any) -> int | None:
    longest = getattr(text_config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def _has_causal_attention(model: nn.Module) -> bool:
    return any(getattr(module, "is_causal", False) for module in model.modules())


def _lineage(model: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The module and all that hold it, innermost first, each with the transformers model it belongs to."""
    name = next(name for name, member in model.named_modules() if member is module)
    member, owner = model, model
    line = [(member, owner)]
    for part in name.split(".") if name else ():
        member = getattr(member, part)
        owner = member if hasattr(member, "_init_weights") else owner
        line.append((member, owner))
    yield from reversed(line)


def _blocks(model: nn.Module) -> Iterator[str]:
    """The layers that transformers itself would not split, where they are members of a list."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    last = ""
    for name, module in model.named_modules():
        inside = last and name.startswith(f"{last}.")
        if type(module).__name__ in kinds and name.rpartition(".")[2].isdigit() and not inside:
            yield (last := name)


# What transformers calls the styles that both sides of a cut have.
_STYLES: dict[str, TensorStyle] = {"colwise": "column", "rowwise": "row"}
# The embedding and the head are shared together or not at all; norms inside a region are found by themselves.
_LEFT_ALONE = ("embedding_rowwise", "replicated_with_grad_allreduce")


def _tensor_styles(model: Any, blocks: Sequence[str], head: str | None) -> dict[str, TensorStyle]:
    """From the model's own plan; empty where that has a style which is none of ours, such as for experts."""
    styles: dict[str, TensorStyle] = {}
    output = _name_of(model, model.get_output_embeddings())
    for pattern, style in (getattr(model, "tp_plan", None) or {}).items():
        if style in _STYLES:
            styles[pattern] = _STYLES[style]
        elif style not in _LEFT_ALONE and pattern != output:
            return {}
    if "column" not in styles.values() or not blocks:
        return {}
    # A layer whose inputs are columns and whose output is a row works on parts in between.
    owners = {style: {p.rpartition(".")[0] for p, s in styles.items() if s == style} for style in ("column", "row")}
    styles |= dict.fromkeys(owners["column"] & owners["row"], "region")
    embed = _name_of(model, model.get_input_embeddings())
    if head is None or embed is None:
        return styles
    styles |= {embed: "vocabulary", head: "vocabulary"}
    if not any(hasattr(module, "exchange") for module in model.modules()):
        return styles  # the masks that it makes are as long as what it is given
    known = {name for name, _ in model.named_modules() if any(_is(name, pattern) for pattern in styles)}
    for name, module in model.named_modules():
        inside = any(name == other or name.startswith(f"{other}.") for other in known)
        if next(module.parameters(recurse=False), None) is not None and not inside:
            styles[name] = "sequence"  # norms
    return styles


def _is(name: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _order(model: Any, blocks: Sequence[str]) -> tuple[str, ...]:
    """Embedding, layers, norm and head, as the model's own plan has them."""
    names = list(getattr(model, "pp_plan", None) or {})
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1 or not lists <= set(names):
        return ()
    embed = _name_of(model, model.get_input_embeddings())
    head = _name_of(model, model.get_output_embeddings())
    middle = [name for name in names if name not in (embed, head)]
    order = [embed, *(part for name in middle for part in (blocks if name in lists else (name,))), head]
    return tuple(name for name in order if name is not None)


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted), None)


def _head(model: Any) -> str | None:
    """The linear layer whose output the model returns as it is; None where it scales or caps the logits after it."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config().to_dict()
    if not isinstance(head, nn.Linear) or any(_changes_logits(key) and config[key] is not None for key in config):
        return None
    return next((name for name, module in model.named_modules() if module is head), None)


def _changes_logits(key: str) -> bool:
    # final_logit_softcapping (Gemma), logit_scale (Cohere), logits_scaling (Granite), lm_head_multiplier (Falcon H1)
    return key == "lm_head_multiplier" or ("logit" in key and "attn" not in key and "router" not in key)
