"""Pretraining of BDH on text: predicts the next byte or token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn

from shoal.data import TextDataset
from shoal.errors import UserError
from shoal.models.bdh import BDH, BDHConfig
from shoal.recipes.recipe import token_loss
from shoal.recipes.text import TextRecipe
from shoal.types import ParallelPlan


class BDHRecipe(TextRecipe):
    """Trains `shoal.models.bdh.BDH` from scratch."""

    class Config(BaseModel):
        model: BDHConfig = BDHConfig()
        dataset: TextDataset = TextDataset()

    def prepare_data(self) -> None:
        self.check_vocabulary("model.vocab_size", self.config.model.vocab_size)
        super().prepare_data()

    def build_model(self) -> nn.Module:
        return BDH(self.config.model)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"tokens": batch["input_ids"]}

    def loss(self, output: tuple[Tensor, None], batch: dict[str, Tensor]) -> Tensor:
        return token_loss(output[0], batch["labels"])

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        return ParallelPlan(
            blocks=tuple(f"levels.{i}" for i in range(self.config.model.n_layer)),
            head="head",
            tensor={
                "encoder": 0,
                "encoder_v": 0,
                "decoder": 0,
                "embed": "vocabulary",
                "lm_head": "vocabulary",
                "head": "vocabulary",
                "levels.*.heads": "sum",
            },
        )

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        heads, tp = self.config.model.n_head, sizes.get("tp", 1)
        if tp > 1 and heads % tp:
            raise UserError(f"distributed.mesh.tp = {tp} does not divide model.n_head = {heads}; change one of them")
        if sizes.get("pp", 1) > 1:
            raise UserError(
                f"distributed.mesh.pp = {sizes['pp']}: all levels of BDH share their weights, so it has no pipeline "
                "stages; use tp or fsdp"
            )
        if sizes.get("cp", 1) > 1:
            raise UserError(
                f"distributed.mesh.cp = {sizes['cp']}: BDH does not support context parallelism; use tp or fsdp"
            )

    def preview(self, model: nn.Module) -> str:
        """Returns a text that the model generates from the first tokens of the evaluation data."""
        assert isinstance(model, BDH)
        tokens = model.generate(self.prompt(model), max_new_tokens=240, temperature=0.8, top_k=50)
        return self.tokenizer.decode(tokens[0].tolist())


if __name__ == "__main__":
    from shoal.cli.recipe import main

    main("bdh")
