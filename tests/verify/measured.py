"""Recipes with metrics, for `prove`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.recipes.causal_lm.recipe import CausalLMRecipe
from verify.planted import Ragged


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    counted = labels != -100
    right = (logits.argmax(-1) == labels) & counted
    return {"accuracy": (right.sum(), counted.sum()), "highest": logits.float().logsumexp(-1)[counted].mean()}


class MeasuredRagged(Ragged):
    """Measures the accuracy on sequences with different numbers of labels."""

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return accuracy(output, batch["labels"])


class MeasuredLM(CausalLMRecipe):
    """Measures the accuracy of a language model."""

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return accuracy(output.logits, batch["labels"])
