"""BDH pretraining on text: bytes or tokens in, the next one out."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn

from shoal.data import TextDataset, Tokenizer, TokenWindows, load_tokenizer, open_text, prepare_text
from shoal.errors import UserError
from shoal.models.bdh import BDH, BDHConfig
from shoal.recipes.base import IGNORED, Recipe
from shoal.types import ParallelPlan


class BDHRecipe(Recipe):
    """Trains `shoal.models.bdh.BDH` from scratch."""

    unit = "tokens"

    class Config(BaseModel):
        model: BDHConfig = BDHConfig()
        dataset: TextDataset = TextDataset()

    def prepare_data(self) -> None:
        given, needed = self.config.model.vocab_size, self.tokenizer.vocab_size
        if given < needed:
            raise UserError(
                f"model.vocab_size = {given}, but dataset.tokenizer = {self.config.dataset.tokenizer!r} makes {needed} "
                f"different tokens; raise it to {needed}"
            )
        prepare_text(self.config.dataset)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.config.dataset.tokenizer)

    @cached_property
    def windows(self) -> tuple[TokenWindows, TokenWindows | None]:
        return open_text(self.config.dataset)

    def build_model(self) -> nn.Module:
        return BDH(self.config.model)

    def train_data(self) -> TokenWindows:
        return self.windows[0]

    def eval_data(self) -> TokenWindows | None:
        return self.windows[1]

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"tokens": batch["input_ids"]}

    def loss(self, output: tuple[Tensor, None], batch: dict[str, Tensor]) -> Tensor:
        logits, _ = output
        return F.cross_entropy(
            logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        return ParallelPlan(blocks=tuple(f"levels.{i}" for i in range(self.config.model.n_layer)))

    def preview(self, model: nn.Module) -> str:
        """How the model goes on from the first words it was not trained on."""
        assert isinstance(model, BDH)
        train, evaluation = self.windows
        prompt = (evaluation or train)[0]["input_ids"][None, :32].to(model.lm_head.device)
        (tokens,) = model.generate(prompt, max_new_tokens=240, temperature=0.8, top_k=50).tolist()
        return self.tokenizer.decode(tokens)
