"""Fine-tunes a causal language model of Hugging Face transformers on instructions and conversations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.instructions import (
    InstructionDataset,
    Prepared,
    collate_samples,
    open_instructions,
    prepare_instructions,
)
from shoal.data.instructions.chat_tokenizer import ChatTokenizer, load_chat_tokenizer, with_added_tokens
from shoal.data.instructions.describe import data_warnings, describe_data, view_data
from shoal.data.instructions.exchanges import Exchange, first_exchanges
from shoal.data.view import DataView
from shoal.errors import UserError
from shoal.models.causal_attention import NAME
from shoal.models.generate import generate_greedily
from shoal.models.packed_attention import PACKABLE, as_mask, positions_of
from shoal.recipes.causal_lm import CausalLMRecipe
from shoal.recipes.causal_lm.recipe import max_positions


class TextLoraRecipe(CausalLMRecipe):
    """A recipe whose section `dataset` is an InstructionDataset."""

    length_key = "max_seq_length"
    preview_on_console = True
    _masks_by_starts = True
    """True if the model has shoal's attention, which takes the starts of packed samples in the place of a mask."""

    class Config(CausalLMRecipe.Config):
        dataset: InstructionDataset  # type: ignore[assignment]

    def prepare_data(self) -> None:
        self.prepare_model()
        kind = self.transformers_config.model_type
        if self.config.dataset.packing and kind not in PACKABLE:
            raise UserError(
                f"dataset.packing = true: a {kind} is not among the models that are proved to keep packed samples "
                f"apart ({', '.join(PACKABLE)}); leave it out"
            )
        prepare_instructions(self.config.dataset, self.tokenizer)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the dataset, with its chat template."""
        dataset, model = self.config.dataset, self.config.model
        revision = model.revision if dataset.tokenizer == model.name else None
        tokenizer = load_chat_tokenizer(dataset.tokenizer, dataset.chat_template, revision)
        return with_added_tokens(tokenizer, self.added_tokens)

    @cached_property
    def prepared(self) -> Prepared:
        """The prepared data."""
        return open_instructions(self.config.dataset, self.tokenizer)

    def train_data(self) -> Any:
        return self.prepared.train

    def eval_data(self) -> Any:
        return self.prepared.evaluation

    def data_summary(self) -> str:
        return describe_data(self.prepared, self.tokenizer)

    def data_digests(self) -> dict[str, dict[str, str]]:
        return self.prepared.digests()

    def data_warnings(self) -> list[str]:
        return data_warnings(self.prepared, self.tokenizer)

    def view_data(self, number: int) -> DataView:
        self.check_length_of_local_model()
        prepare_instructions(self.config.dataset, self.tokenizer)
        return view_data(self.prepared, self.tokenizer, number)

    @property
    def sizes_vary(self) -> bool:  # type: ignore[override]
        """True if batches are padded to their longest sample."""
        return not self.config.dataset.packing and not self.config.dataset.pad_to_max

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        dataset = self.config.dataset
        return collate_samples(samples, self.tokenizer.filler, dataset.max_seq_length, dataset.pad_to_max)

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        if self.config.dataset.packing:
            self._masks_by_starts = model.config.get_text_config()._attn_implementation == NAME
        return model

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        if "starts" not in batch:
            return super().inputs(batch)
        starts, length = batch["starts"], batch["input_ids"].shape[1]
        # Other attentions make their masks from positions that start again, each for its own window.
        mask = {"attention_mask": as_mask(starts, length)} if self._masks_by_starts else {}
        return {**super().inputs(batch), "position_ids": positions_of(starts, length), **mask}

    def split_sequence(self, batch: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
        if "starts" in batch:  # `check_mesh` refuses packs in several parts
            return batch
        return super().split_sequence(batch, index, parts)

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        dataset = self.config.dataset
        if dataset.packing and sizes.get("cp", 1) > 1:
            raise UserError(
                f"dataset.packing = true: distributed.mesh.cp = {sizes['cp']} splits sequences over ranks, and packed "
                "samples would be cut; leave one of them out"
            )
        for side in ("pp", "cp"):
            if sizes.get(side, 1) > 1 and not dataset.packing and not dataset.pad_to_max:
                raise UserError(
                    f"distributed.mesh.{side} = {sizes[side]} needs sequences of one length; set dataset.pad_to_max: "
                    "true" + (" or dataset.packing: true" if side == "pp" else "")
                )
        super().check_mesh(sizes)

    @cached_property
    def _exchanges(self) -> list[Exchange]:
        return first_exchanges(self.prepared, self.config.dataset.preview_prompts)

    def preview(self, model: nn.Module) -> str | None:  # type: ignore[override]
        """Returns None: `preview_texts` has what is shown."""
        return None

    def preview_texts(self, model: nn.Module, index: int, parts: int) -> list[str]:
        """Returns the model's answers to some of the first prompts of the evaluation data, beside the references.

        Answers end where the model has no positions left after the longest prompt. Of a prompt that leaves no position
        only the end is kept.
        """
        if not self._exchanges:
            return []
        device = torch.get_default_device()
        device = next(model.parameters()).device if device.type == "cpu" else device
        # A rank without a prompt answers the first one all the same: a sharded model needs all ranks in each forward.
        shared = self._exchanges[index::parts]
        # The number of tokens depends on all prompts, also on those of other ranks: it is the number of forwards.
        wanted = min(self.config.dataset.preview_tokens, max(len(one.reference) for one in self._exchanges) + 8)
        limit = max_positions(self.transformers_config.get_text_config()) or 1 << 30
        number = max(1, min(wanted, limit - max(len(one.prompt) for one in self._exchanges)))
        prompts = [one.prompt[-(limit - number) :].to(device) for one in shared or self._exchanges[:1]]
        answers = generate_greedily(model, prompts, number, self.tokenizer.filler)[: len(shared)]
        return [
            exchange.describe(self.tokenizer, answer) for exchange, answer in zip(shared, answers.tolist(), strict=True)
        ]


if __name__ == "__main__":
    from shoal.cli.recipe import main

    main("text_lora")
