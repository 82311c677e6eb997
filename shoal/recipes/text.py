"""The common part of the language-model recipes: text as windows of tokens, and the prompt of a preview."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from shoal.data import Tokenizer, TokenWindows, load_tokenizer, open_text, prepare_text
from shoal.data.view import DataView
from shoal.errors import UserError
from shoal.recipes.recipe import Recipe


class TextRecipe(Recipe):
    """A recipe whose section `dataset` is a TextDataset."""

    unit = "tokens"

    @property
    def added_tokens(self) -> Sequence[str]:
        """New tokens of the tokenizer."""
        return ()

    def prepare_data(self) -> None:
        prepare_text(self.config.dataset, self.added_tokens)

    def check_vocabulary(self, key: str, vocab_size: int) -> None:
        """Refuses a model with fewer tokens than the tokenizer; on a GPU they would fail in a device assertion."""
        if vocab_size < (needed := self.tokenizer.vocab_size):
            raise UserError(
                f"{key} = {vocab_size}, but dataset.tokenizer = {self.config.dataset.tokenizer!r} has {needed} tokens; "
                f"raise it to {needed}"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the dataset."""
        return load_tokenizer(self.config.dataset.tokenizer, self.added_tokens)

    @cached_property
    def windows(self) -> tuple[TokenWindows, TokenWindows | None]:
        """The training and the evaluation data."""
        return open_text(self.config.dataset, self.added_tokens)

    def train_data(self) -> TokenWindows:
        return self.windows[0]

    def eval_data(self) -> TokenWindows | None:
        return self.windows[1]

    def view_data(self, number: int) -> DataView:
        prepare_text(self.config.dataset, self.added_tokens)
        train, evaluation = self.train_data(), self.eval_data()
        shown = [train[index]["input_ids"].tolist() for index in range(min(number, len(train)))]
        facts = {
            "samples": f"{len(train):,} an epoch",
            "tokens": f"{len(train) * train.seq_length:,} an epoch, all counted; {train.seq_length:,} in each sample",
            "evaluation": f"{len(evaluation):,} samples" if evaluation is not None else "none",
        }
        return DataView([[(self.tokenizer.decode(tokens), True)] for tokens in shown], facts)

    def prompt(self, model: nn.Module) -> Tensor:
        """Returns the first tokens of the evaluation data, (1, time), on the device on which the model computes.

        Offloaded parameters are on another device, so the trainer sets torch's default device to the right one.
        """
        device = torch.get_default_device()
        device = next(model.parameters()).device if device.type == "cpu" else device
        return (self.eval_data() or self.train_data())[0]["input_ids"][None, :32].to(device)
