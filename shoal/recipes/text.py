"""What the language-model recipes share: text as windows of tokens, and where a preview starts."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from shoal.data import Tokenizer, TokenWindows, load_tokenizer, open_text, prepare_text
from shoal.errors import UserError
from shoal.recipes.recipe import Recipe


class TextRecipe(Recipe):
    """A recipe whose `dataset` section is a TextDataset."""

    unit = "tokens"

    def prepare_data(self) -> None:
        prepare_text(self.config.dataset)

    def check_vocabulary(self, key: str, given: int) -> None:
        """Refuses a model that has no room for some tokens; on a GPU they would end in a device assertion."""
        if given < (needed := self.tokenizer.vocab_size):
            raise UserError(
                f"{key} = {given}, but dataset.tokenizer = {self.config.dataset.tokenizer!r} makes {needed} "
                f"different tokens; raise it to {needed}"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.config.dataset.tokenizer)

    @cached_property
    def windows(self) -> tuple[TokenWindows, TokenWindows | None]:
        return open_text(self.config.dataset)

    def train_data(self) -> TokenWindows:
        return self.windows[0]

    def eval_data(self) -> TokenWindows | None:
        return self.windows[1]

    def prompt(self, model: nn.Module) -> Tensor:
        """The first words the model was not trained on: (1, time), where the model computes.

        Under offload that is not where its parameters are, so a trainer says so by torch's default device.
        """
        train, evaluation = self.windows
        device = torch.get_default_device()
        device = next(model.parameters()).device if device.type == "cpu" else device
        return (evaluation or train)[0]["input_ids"][None, :32].to(device)
