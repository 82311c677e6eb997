"""Trains any causal language model of Hugging Face transformers, from scratch or from its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from shoal.data import TextDataset
from shoal.data.hub import hub
from shoal.data.tokenizer import add_tokens
from shoal.data.view import DataView
from shoal.errors import UserError
from shoal.lora import LoraConfig
from shoal.lora.adapters import (
    add_adapters,
    is_adapter_tensor,
    magnitude_sources,
    reset_with,
    split_groups,
)
from shoal.lora.trained_tokens import row_sources
from shoal.models.causal_attention import use_causal_attention
from shoal.quantised.layers import quantise_layers, quantised_reset
from shoal.quantised.library import import_bitsandbytes
from shoal.quantised.schemes import Scheme
from shoal.quantised.sources import matrix_sources, quantised_sources
from shoal.recipes.causal_lm.added_tokens import check_trained, with_added_rows
from shoal.recipes.causal_lm.config import (
    CausalLMConfig,
    check_lora,
    import_transformers,
    known_keys,
    make_config,
    one_line,
)
from shoal.recipes.causal_lm.folder import fetch_folder, safetensors_in
from shoal.recipes.causal_lm.plan import make_plan
from shoal.recipes.causal_lm.quantisation import skipped_layers, stored_quantisation
from shoal.recipes.causal_lm.transformers_private import file_sources, initialise
from shoal.recipes.recipe import token_loss
from shoal.recipes.text import TextRecipe
from shoal.tensors import DTYPES
from shoal.types import ParallelPlan, Weights
from shoal.weights import parameters_on_meta
from shoal.weights.conversion import open_files

PREVIEW_TOKENS = 240
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


class CausalLMRecipe(TextRecipe):
    """A recipe that trains a causal language model of transformers on text."""

    length_key = "seq_length"
    """The key of `dataset` that limits the length of sequences."""
    _stored_quantisation: dict[str, Any] | None = None
    """How the weights are quantised in their files; None if they are not."""
    _stored_vocabulary = 0
    """With `model.added_tokens`: the number of tokens that the weights in their files have rows for."""

    class Config(BaseModel):
        model: CausalLMConfig = Field(default_factory=CausalLMConfig)
        lora: LoraConfig | None = None
        dataset: TextDataset = TextDataset()

        @model_validator(mode="before")
        @classmethod
        def _default_tokenizer(cls, values: Any) -> Any:
            """Makes `model.name` the default of `dataset.tokenizer`: weights know the tokens of their tokenizer."""
            model, dataset = values.get("model") or {}, values.get("dataset") or {}
            if isinstance(model, dict) and isinstance(dataset, dict) and isinstance(name := model.get("name"), str):
                return {**values, "dataset": {"tokenizer": name, **dataset}}
            return values

        @model_validator(mode="after")
        def _check_lora(self) -> Any:
            check_lora(self.model, self.lora)
            return self

    @property
    def added_tokens(self) -> Sequence[str]:
        added: list[str] = self.config.model.added_tokens
        return added

    @cached_property
    def added_token_ids(self) -> list[int]:
        """The numbers of the tokens in `model.added_tokens`."""
        if not self.added_tokens:
            return []  # without loading a tokenizer: a model can be built that has none
        ids = [self.tokenizer.encode(token).tolist() for token in self.added_tokens]
        known = self.tokenizer.vocab_size - len(ids)
        if ids != [[known + place] for place in range(len(ids))]:
            raise UserError(
                f"model.added_tokens: dataset.tokenizer = {self.config.dataset.tokenizer!r} does not number new tokens "
                "one after another; add them to the tokenizer's files, and leave this out"
            )
        return [token for (token,) in ids]

    def add_tokens(self, tokenizer: Any) -> None:
        """Adds the tokens in `model.added_tokens` to a tokenizer of transformers."""
        add_tokens(tokenizer, self.added_tokens)

    def prepare_data(self) -> None:
        self.prepare_model()
        super().prepare_data()

    def prepare_model(self) -> None:
        """Downloads the weights, and refuses data that the model cannot take."""
        model = self.config.model
        if model.name is not None:
            fetch_folder(model.name, model.revision, model.trust_remote_code)
            self.files  # noqa: B018  # refuses files that cannot be read, before the text is prepared
        if self.scheme is not None:
            import_bitsandbytes(f"model.{'load_in_8bit' if model.load_in_8bit else 'load_in_4bit'}")
        text_config = self.transformers_config.get_text_config()
        key = "model.config.vocab_size" if model.config is not None else f"the vocabulary of model.name {model.name!r}"
        self.check_vocabulary(key, text_config.vocab_size)
        if self.added_token_ids and model.name is not None and self.added_token_ids[0] > self._stored_vocabulary:
            raise UserError(
                f"model.added_tokens: {key} has {self._stored_vocabulary} tokens, fewer than dataset.tokenizer = "
                f"{self.config.dataset.tokenizer!r} without them; use the model's tokenizer"
            )
        self._check_length()
        if self.config.lora is not None:
            with parameters_on_meta():
                self.build_model()  # refuses targets that match nothing, before the text is prepared

    def view_data(self, number: int) -> DataView:
        self.check_length_of_local_model()
        return super().view_data(number)

    def check_length_of_local_model(self) -> None:
        """Refuses sequences longer than the model's, unless it may have to be downloaded first."""
        name = self.config.model.name
        if name is None or Path(name).is_dir():
            self._check_length()

    def _check_length(self) -> None:
        model, length = self.config.model, getattr(self.config.dataset, self.length_key)
        longest = max_positions(self.transformers_config.get_text_config())
        if longest is not None and length > longest:
            raise UserError(
                f"dataset.{self.length_key} = {length}: the model has max_position_embeddings = {longest}; "
                + ("raise it in model.config" if model.config is not None else f"use {longest} or less")
            )

    @cached_property
    def folder(self) -> Path:
        """The folder with the weights, which `prepare_data` has downloaded."""
        model = self.config.model
        return fetch_folder(model.name, model.revision, model.trust_remote_code, local_only=True)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files with the weights."""
        return safetensors_in(self.folder)

    @cached_property
    def transformers_config(self) -> Any:
        """The model's transformers configuration: the one beside the weights, or the one that `model.config` makes."""
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
                        f"model.name = {model.name!r}: the model comes with its own code; if you trust it, set "
                        "model.trust_remote_code: true"
                    ) from error
            self._stored_quantisation = stored_quantisation(config, model.name)
            if self.added_tokens:
                text = config.get_text_config()
                self._stored_vocabulary = text.vocab_size
                text.vocab_size = max(text.vocab_size, self.tokenizer.vocab_size)
            return config
        keys = dict(model.config)
        if "vocab_size" in known_keys(keys["model_type"]):
            keys.setdefault("vocab_size", self.tokenizer.vocab_size)
            # The defaults of the class belong to another vocabulary. A padding token among them would never be learnt.
            special = {key: None for key in _SPECIAL_TOKENS if key in known_keys(keys["model_type"])}
            keys = {**special, "eos_token_id": self.tokenizer.eos, **keys}
        return make_config(keys)

    @cached_property
    def scheme(self) -> Scheme | None:
        """How the base is quantised, or None if it is not."""
        self.transformers_config  # noqa: B018  # says how the weights are stored
        return self.config.model.scheme(self._stored_quantisation)

    def build_model(self) -> nn.Module:
        section = self.config.model
        options = {"attn_implementation": section.attn_implementation} if section.attn_implementation else {}
        try:
            model: nn.Module = import_transformers().AutoModelForCausalLM.from_config(
                self.transformers_config, dtype=torch.float32, trust_remote_code=section.trust_remote_code, **options
            )
        except (ValueError, ImportError) as error:
            source = f"model.name = {section.name!r}" if section.name else "model.config"
            raise UserError(f"{source}: transformers cannot build the model: {one_line(error)}") from error
        is_causal = any(getattr(module, "is_causal", False) for module in model.modules())
        if getattr(self.transformers_config, "is_decoder", None) is False and not is_causal:
            raise UserError(
                f"model.config.model_type = {self.transformers_config.model_type!r}: the model sees the tokens that it "
                "should predict; set model.config.is_decoder: true"
            )
        if section.attn_implementation is None:
            use_causal_attention(model)
        if self.scheme is not None:
            key = "model.load_in_8bit" if section.load_in_8bit else "model.load_in_4bit"
            quantise_layers(model, self.scheme, skipped_layers(model, self._stored_quantisation), key)
        if self.config.lora is not None:
            add_adapters(model, self.config.lora, DTYPES[section.dtype or "fp32"], self.added_token_ids)
            if self.added_token_ids:
                check_trained(model)
        if self.scheme is not None or self.config.lora is not None:
            model.save_pretrained = _refuse_to_save  # type: ignore[assignment]
        return model

    def weights(self) -> Weights:
        draw = quantised_reset(initialise) if self.scheme is not None else initialise
        reset = reset_with(draw) if self.config.lora is not None else None
        if self.config.model.name is None:
            return Weights("init", reset=reset or draw)
        files = open_files(self.files)
        with parameters_on_meta():
            model = self.build_model()
        sources = file_sources(model, files)
        if self.added_token_ids:
            sources = with_added_rows(model, sources, self.added_token_ids)
        sources = quantised_sources(model, sources, files)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not is_adapter_tensor(name):
                names.setdefault(parameter, []).append(name)
        missing = next((tied_names[0] for tied_names in names.values() if sources.keys().isdisjoint(tied_names)), None)
        if missing is not None:
            raise UserError(
                f"model.name = {self.config.model.name!r}: its files have no tensor {missing!r} (they have "
                f"{min(files, default='none')!r}): they hold a base model without its head, or another model; "
                "save the whole model by AutoModelForCausalLM and save_pretrained"
            )
        return Weights(
            "files",
            reason=f"{len(self.added_tokens)} new tokens start as the mean of the others" * bool(self.added_tokens),
            files=self.files,
            sources={**sources, **magnitude_sources(model, matrix_sources(sources)), **row_sources(model, sources)},
            reset=reset,
        )

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
        return {"input_ids": batch["input_ids"], "use_cache": False, **positions}

    def split_sequence(self, batch: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
        length = batch["input_ids"].shape[1]
        if length % parts:
            raise UserError(
                f"distributed.mesh.cp = {parts} does not divide sequences of {length} tokens; change dataset."
                f"{self.length_key}"
            )
        part = slice(index * length // parts, (index + 1) * length // parts)
        positions = torch.arange(length, device=batch["input_ids"].device)[None, part]
        return {**{key: batch[key][:, part] for key in ("input_ids", "labels")}, "position_ids": positions}

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        return token_loss(output.logits, batch["labels"])

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        return make_plan(model)

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        groups = super().param_groups(model)
        return groups if self.config.lora is None else split_groups(model, groups, self.config.lora.lora_plus_ratio)

    @cached_property
    def _config_without_weights(self) -> Any:
        """The text configuration that `model.config` makes, or None for a model from weights: they may not be
        downloaded yet."""
        keys = self.config.model.config
        return None if keys is None else make_config(keys).get_text_config()

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        for key in ("load_in_4bit", "load_in_8bit"):
            if sizes.get("tp", 1) > 1 and getattr(self.config.model, key):
                raise UserError(
                    f"distributed.mesh.tp = {sizes['tp']}: tensor parallelism does not split quantised layers, which "
                    f"model.{key} makes; use dp_shard, cp or pp"
                )
        if self.config.lora is not None and self.config.lora.target_parameters and sizes.get("tp", 1) > 1:
            raise UserError(
                f"distributed.mesh.tp = {sizes['tp']}: tensor parallelism does not split the adapters of "
                "lora.target_parameters; use dp_shard, cp or pp"
            )
        if self.config.lora is not None and self.config.lora.lora_bias and sizes.get("tp", 1) > 1:
            raise UserError(
                f"distributed.mesh.tp = {sizes['tp']}: lora.lora_bias = true is not for tensor parallelism, which "
                "would add it on every rank; leave one of them out"
            )
        if self._config_without_weights is None:
            return
        tp, cp = (sizes.get(side, 1) for side in ("tp", "cp"))
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(self._config_without_weights, key, None)
            for side, ranks in (("tp", tp), ("tp × cp", tp * cp)):
                if heads and heads % ranks:
                    raise UserError(
                        f"distributed.mesh: {side} = {ranks} does not divide model.config.{key} = {heads}; change one"
                    )
        length = getattr(self.config.dataset, self.length_key)
        if length % cp:
            raise UserError(
                f"distributed.mesh.cp = {cp} does not divide dataset.{self.length_key} = {length}; change one of them"
            )

    def num_blocks(self) -> int | None:
        return None if self._config_without_weights is None else self._config_without_weights.num_hidden_layers

    def preview(self, model: nn.Module) -> str:
        """Returns how the model continues the first words that it was not trained on.

        The text has a fixed length, because all ranks of a sharded model have to call it equally often.
        """
        generator: Any = model
        config, prompt = generator.config.get_text_config(), self.prompt(model)
        length = min(PREVIEW_TOKENS, (max_positions(config) or 1 << 30) - prompt.shape[1])
        if length < 1:
            return self.tokenizer.decode(prompt[0].tolist())
        tokens = generator.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
            suppress_tokens=list(range(self.tokenizer.vocab_size, config.vocab_size)) or None,
        )
        return self.tokenizer.decode(tokens[0].tolist())


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    """Stands in for transformers' `save_pretrained`, which would write the names of adapters and quantised weights that
    transformers takes for unknown ones and leaves out."""
    raise UserError(
        "save_pretrained: transformers cannot open a model with shoal's adapters or quantised layers; export a "
        "checkpoint by `shoal checkpoint export STEP_DIR OUT --to peft` or `--to hf`"
    )


def max_positions(text_config: Any) -> int | None:
    """Returns the longest sequence that the model can take, or None if it has no limit."""
    longest = getattr(text_config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None
