"""What to train: the one class a user writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import default_collate

from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.seeding import SampleRng
from shoal.types import IGNORED, ParallelPlan, Weights


class Recipe:
    """Model, data and loss of a run. It knows nothing of ranks, devices or batch sizes.

    Only `build_model`, `train_data`, `inputs` and `loss` are needed.
    """

    class Config(BaseModel):
        """The sections `model`, `lora` and `dataset` of a run, typed. Keys it does not have are refused."""

    unit = "samples"
    """What `count` counts, for the log: `tokens` in a language model."""

    def __init__(self, config: Any = None):
        self.config: Any = config if config is not None else self.Config()

    def prepare_data(self) -> None:
        """Downloads, tokenises, caches. Runs once per node, before any process group exists."""

    def build_model(self) -> nn.Module:
        raise UserError(f"recipe {type(self).__name__} needs build_model(self) -> nn.Module")

    def weights(self) -> Weights:
        """Where the weights come from: drawn module by module under their names, unless the model has to be `built`."""
        return Weights("init")

    def train_data(self) -> Any:
        """A map-style dataset of dicts, or a stream (see shoal.data)."""
        raise UserError(f"recipe {type(self).__name__} needs train_data(self)")

    def eval_data(self) -> Any:
        """Like `train_data`; None means that there is nothing to evaluate on."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def example_batch(self, size: int) -> Any:
        """Returns the first samples of `train_data`, collated, for planning."""
        loader = Loader(self.train_data(), self.collate, BatchSchedule.constant(size, size), seed=0, shuffle=False)
        step = next(iter(loader), None)
        if step is None:
            raise UserError(f"recipe {type(self).__name__}: train_data has no samples")
        return step[0].data

    def prepare_batch(self, batch: Any, rng: SampleRng) -> Any:
        """On the device, before the forward: noise, augmentation. Draw from `rng` alone: it belongs to the samples."""
        return batch

    def inputs(self, batch: Any) -> dict[str, Any]:
        """What the model is called with, by keyword."""
        raise UserError(f"recipe {type(self).__name__} needs inputs(self, batch) -> dict")

    def count(self, batch: Any) -> Tensor | int:
        """How many things the loss sums over: labels that are not ignored, else samples."""
        if isinstance(batch, dict) and isinstance(labels := batch.get("labels"), Tensor):
            return (labels != IGNORED).sum()
        return num_samples(batch)

    def labels(self, batch: Any) -> Tensor:
        """Returns the labels of the tokens that the head predicts; asked for by `training.loss_chunks` and by a head
        that tensor parallelism cuts."""
        if isinstance(batch, dict) and isinstance(labels := batch.get("labels"), Tensor):
            return labels
        raise UserError(
            f"recipe {type(self).__name__}: a batch has no tensor `labels`, which training.loss_chunks and a head cut "
            "by tensor parallelism need; add it, or override labels(self, batch) -> Tensor"
        )

    def sequence_length(self, batch: Any) -> int:
        """Returns the number of tokens in each sequence of a batch."""
        if isinstance(batch, dict) and isinstance(tokens := batch.get("input_ids"), Tensor) and tokens.ndim > 1:
            return tokens.shape[1]
        raise UserError(
            f"recipe {type(self).__name__}: a batch has no tensor `input_ids` of (batch, time); add it, or override "
            "sequence_length(self, batch) -> int"
        )

    def loss(self, output: Any, batch: Any) -> Tensor:
        """A SUM over what `count` counts; shoal divides by the count of the whole global batch."""
        raise UserError(f"recipe {type(self).__name__} needs loss(self, output, batch) -> Tensor")

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups for the optimizer. Norms, biases and embeddings do not decay."""
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        trainable = [p for p in model.parameters() if p.requires_grad]
        flat = [p for p in trainable if p.ndim < 2 or id(p) in embeddings]
        flat_ids = {id(p) for p in flat}
        decayed = [p for p in trainable if id(p) not in flat_ids]
        # Also empty ones: a stage of a pipeline has as many groups as the whole model.
        return [{"params": decayed}, {"params": flat, "weight_decay": 0.0}]

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """How the model may be cut; by default its longest list of like modules are the blocks."""
        return ParallelPlan.derive(model)

    def split_sequence(self, batch: Any, index: int, parts: int) -> Any:
        """The batch with the `index`-th of so many equal parts of every sequence, which says what positions those are.

        Context and sequence parallelism ask for it; with one part it is the whole, with its positions.
        """
        raise UserError(
            f"recipe {type(self).__name__} does not say how to split a sequence (split_sequence), which "
            "distributed.mesh.cp and distributed.tensor.sequence_parallel need"
        )

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Refuses what the model cannot be cut into, as far as it can be known without building it."""

    def num_blocks(self) -> int | None:
        """How many blocks the model has, where that is known without building it: every stage of a pipeline has one."""
        return None

    def preview(self, model: nn.Module) -> str | None:
        """Something to look at after an evaluation, such as a generated text. Called on every rank."""
        return None


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross-entropy over labels that are not ignored, in float32.

    Logits (..., vocab) against labels (...), which are the tokens to be predicted: nothing is shifted here. A recipe
    whose loss is this may name its `head` in the plan. With `training.loss_chunks` the head then returns that sum
    itself, one number in place of the logits, and it is passed on.
    """
    if logits.ndim == 0:
        return logits
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def num_samples(batch: Any) -> int:
    """The leading size of the first tensor in a batch."""
    if isinstance(batch, Tensor):
        return batch.shape[0]
    values = batch.values() if isinstance(batch, dict) else batch
    for value in values:
        if isinstance(value, Tensor | dict | list | tuple):
            return num_samples(value)
    raise TypeError(f"cannot tell how many samples a batch of {type(batch).__name__} holds; override Recipe.count")
