"""The `model:` section of recipe causal_lm, and the transformers configuration that its keys make."""

from __future__ import annotations

import dataclasses
import re
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from shoal.errors import UserError
from shoal.recipes.causal_lm.folder import is_folder

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
        elif self.revision is not None and is_folder(self.name or ""):
            raise UserError(f"model.revision: {self.revision!r} has no use with the folder {self.name}; leave it out")
        return self


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("recipe causal_lm needs the package transformers; run `pip install shoal[hf]`") from None
    return transformers


def _config_class(model_type: Any) -> Any:
    mapping = import_transformers().CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    if model_type not in causal or model_type not in mapping:
        nearest = get_close_matches(str(model_type), causal, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "llama, qwen3 and gpt2 are some"
        raise UserError(f"model.config.model_type = {model_type!r} is not a causal language model; {hint}")
    return mapping[model_type]


def known_keys(model_type: str) -> set[str]:
    """What a model's own configuration class declares. Those all classes share are about tasks and storage."""
    made = _config_class(model_type)
    shared = {field.name for field in dataclasses.fields(import_transformers().PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(made)} - shared
    return own | set(made.attribute_map) | set(_ROPE_KEYS if "rope_parameters" in own else ())


def _check_keys(given: dict[str, Any]) -> None:
    """transformers keeps keys it does not know and does nothing with them."""
    if "model_type" not in given:
        raise UserError("model.config.model_type is missing: say which kind of model, such as llama")
    known = known_keys(given["model_type"])
    for key in given:
        if key in known and key in _WITHOUT_EFFECT:
            raise UserError(f"model.config.{key} has no effect in recipe causal_lm; leave it out")
        if key != "model_type" and key not in known:
            nearest = get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean model.config.{nearest[0]}?" if nearest else f"it has {', '.join(sorted(known))}"
            raise UserError(f"model.config.{key} is not a key of a {given['model_type']}; {hint}")
    make_config(given)


def make_config(keys: dict[str, Any]) -> Any:
    values = {key: value for key, value in keys.items() if key != "model_type"}
    try:
        return _config_class(keys["model_type"])(**values)
    except Exception as error:  # their validators raise many kinds
        raise UserError(f"model.config: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    # "Validation error for field 'x': TypeError: Field 'x' expected …": the last part says it all.
    return re.sub(r"^.*?\b(?:Type|Value)Error: ", "", text)[:300]
