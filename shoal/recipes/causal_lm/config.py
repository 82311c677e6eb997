"""The `model:` section of recipe causal_lm, and the transformers configuration that its keys make."""

from __future__ import annotations

import dataclasses
import re
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from shoal.errors import UserError
from shoal.recipes.causal_lm.folder import is_folder
from shoal.recipes.causal_lm.quantisation import QuantisationKeys

# Older names of keys that transformers moves into `rope_parameters`.
_ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor")
# Training uses no cache, and its loss is the cross-entropy alone, without the one that balances experts.
_WITHOUT_EFFECT = ("use_cache", "output_router_logits", "router_aux_loss_coef")


class CausalLMConfig(QuantisationKeys):
    """The `model:` section: either the name of weights to start from, or the configuration of a new model."""

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
    added_tokens: list[str] = Field(default_factory=list)
    """New tokens for the tokenizer, such as `<tool>`; they are never split. Embedding and head get a row for each that
    they do not have; with a `name`, all of them start as the mean of the rows of the other tokens."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """With `lora:`, the type in which frozen weights are kept. Trained weights are fp32. Default: fp32."""

    @model_validator(mode="after")
    def _check_name_or_config(self) -> CausalLMConfig:
        if (self.name is None) == (self.config is None):
            raise UserError(
                f"model.name and model.config: both are {'given' if self.name else 'missing'}; give a name (weights to "
                "start from) or a config (from scratch)"
            )
        if self.config is not None:
            for key in ("revision", "trust_remote_code"):
                if getattr(self, key):
                    raise UserError(f"model.{key} = {getattr(self, key)!r}: no effect with model.config; leave it out")
            _check_keys(self.config)
        for number, token in enumerate(self.added_tokens):
            if not token.strip() or token in self.added_tokens[:number]:
                what = "is named twice" if token.strip() else "is empty"
                raise UserError(f"model.added_tokens: the token {token!r} {what}; leave it out")
        self.check_quantisation("?" if self.name else "")
        if self.name and self.revision is not None and is_folder(self.name):
            raise UserError(f"model.revision = {self.revision!r}: no effect with the folder {self.name}; leave it out")
        return self


def check_lora(model: CausalLMConfig, lora: Any) -> None:
    """Raises UserError for keys of `model:` and `lora:` that do not fit together."""
    if lora is None and model.dtype is not None:
        raise UserError(
            f"model.dtype = {model.dtype}: it is the type of frozen weights, and without lora: all weights are "
            "trained, in fp32; use training.mixed_precision, or leave it out"
        )
    if lora is not None and lora.use_dora and model.name is None:
        raise UserError(
            "lora.use_dora = true: its magnitudes start from the weights of the base, and model.config has none; give "
            "model.name"
        )
    if lora is not None and lora.trainable_token_indices is not None and model.name is None:
        raise UserError(
            "lora.trainable_token_indices: trained rows start from those of the base, and model.config has none; give "
            "model.name"
        )


def import_transformers() -> Any:
    """Returns the package transformers. Raises UserError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "recipe = causal_lm: the package transformers is missing; run `pip install shoal[hf]`"
        ) from None
    return transformers


def _config_class(model_type: Any) -> Any:
    """Returns the configuration class of a kind of causal language model. Raises UserError if there is none."""
    mapping = import_transformers().CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    if model_type not in causal or model_type not in mapping:
        nearest = get_close_matches(str(model_type), causal, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "use one such as llama, qwen3 or gpt2"
        raise UserError(
            f"model.config.model_type = {model_type!r}: transformers has no such causal language model; {hint}"
        )
    return mapping[model_type]


def known_keys(model_type: str) -> set[str]:
    """Returns the keys that a model's configuration class declares, without those that all classes share: these are
    about tasks and storage."""
    config_class = _config_class(model_type)
    shared = {field.name for field in dataclasses.fields(import_transformers().PreTrainedConfig)}
    declared = {field.name for field in dataclasses.fields(config_class)} - shared
    return declared | set(config_class.attribute_map) | set(_ROPE_KEYS if "rope_parameters" in declared else ())


def _check_keys(keys: dict[str, Any]) -> None:
    """Raises UserError for a key that the model does not have. transformers would keep it and never use it."""
    if "model_type" not in keys:
        raise UserError("model.config.model_type: missing; give a kind of model, such as llama")
    known = known_keys(keys["model_type"])
    for key in keys:
        if key in known and key in _WITHOUT_EFFECT:
            raise UserError(f"model.config.{key}: no effect in recipe causal_lm; leave it out")
        if key != "model_type" and key not in known:
            nearest = get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean model.config.{nearest[0]}?" if nearest else f"it has {', '.join(sorted(known))}"
            raise UserError(f"model.config.{key} is not a key of a {keys['model_type']}; {hint}")
    make_config(keys)


def make_config(keys: dict[str, Any]) -> Any:
    """Returns the transformers configuration that these keys make. Raises UserError if a value is refused."""
    try:
        return _config_class(keys["model_type"])(**{key: keys[key] for key in keys if key != "model_type"})
    except Exception as error:  # the validators of transformers raise many kinds
        raise UserError(f"model.config: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Returns the message of an error as one short line."""
    # Of "Validation error for field 'x': TypeError: Field 'x' expected …" only the end is needed.
    return re.sub(r"^.*?\b(?:Type|Value)Error: ", "", " ".join(str(error).split()))[:300]
