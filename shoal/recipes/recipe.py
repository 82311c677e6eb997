"""The recipe: the class in which a user says what to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import getattr_static
from typing import Any

import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from shoal.callbacks.hook_methods import HookMethods
from shoal.data import BatchSchedule, Loader
from shoal.data.view import DataView
from shoal.errors import UserError, one_line
from shoal.seeding import SampleRng
from shoal.types import IGNORED_LABEL, ParallelPlan, Weights, required


class Recipe(HookMethods):
    """The model, the data and the loss of a run. A recipe knows nothing about ranks, devices and batch sizes.

    A subclass has to define `build_model`, `train_data`, `inputs` and `loss`; all other methods have defaults. One with
    several `objectives` defines `objective_loss` instead of `inputs` and `loss`. Hooks, such as `after_step`, do
    nothing.
    """

    class Config(BaseModel):
        """Declares the keys of the sections `model`, `lora` and `dataset`. Other keys in these sections are refused."""

    unit = "samples"
    """The name of what `count` counts, for the log."""

    loss_mixes_samples = False
    """True if the loss compares the samples of a batch, as a contrastive one does, so that it is no sum over samples.
    The check of the first batch is then left out, and layouts with other micro-batches train otherwise."""

    sizes_vary = False
    """True if tensors have many sizes, as sequences do that are padded to the longest of their batch.
    `training.compile` then makes graphs that fit all sizes from the first step on. Otherwise each size has a graph of
    its own, which suits few sizes."""

    preview_on_console = False
    """True if every preview is printed on the console. The one at the end of a run is printed in any case."""

    def __init__(self, config: Any = None):
        self.config: Any = config if config is not None else self.Config()

    @property
    def has_metrics(self) -> bool:
        """True if `metrics` is defined, by the class or by an attribute of the object."""
        return getattr(self.metrics, "__func__", None) is not Recipe.metrics

    @property
    def prepares_batches(self) -> bool:
        """True if `prepare_batch` is defined, by the class or by an attribute of the object."""
        return getattr(self.prepare_batch, "__func__", None) is not Recipe.prepare_batch

    @property
    def builds_optimizer(self) -> bool:
        """True if `build_optimizer` is defined, by the class or by an attribute of the object."""
        return getattr(self.build_optimizer, "__func__", None) is not Recipe.build_optimizer

    def misspelt_names(self) -> dict[str, str]:
        """Returns methods and attributes that nobody reads and whose names are nearly those of others that shoal reads,
        with these: `metrics` for `metric`."""
        known = {name: callable(getattr(Recipe, name)) for name in dir(Recipe) if not name.startswith("_")}
        found: dict[str, str] = {}
        for name in dir(self):
            if name.startswith("_") or name in known:
                continue
            is_method = callable(getattr_static(self, name))
            alike = [other for other in known if known[other] == is_method]
            if near := get_close_matches(name, alike, n=1, cutoff=0.85 if is_method else 0.75):
                found[name] = near[0]
        return found

    def prepare_data(self) -> None:
        """Downloads, tokenizes and caches data. Runs in one process of each machine, before any process group
        exists."""

    def build_model(self) -> nn.Module:
        """Returns the model, a plain module for one device."""
        raise UserError(f"recipe {type(self).__name__} needs build_model(self) -> nn.Module")

    def weights(self) -> Weights:
        """Returns where the initial weights come from. By default each module draws its own, seeded by its name."""
        return Weights("init")

    def train_data(self) -> Any:
        """Returns a map-style dataset of dicts, or a stream (see `shoal.data`)."""
        raise UserError(f"recipe {type(self).__name__} needs train_data(self)")

    def eval_data(self) -> Any:
        """Returns the data for evaluation, of the kind that `train_data` returns, or a dict of several such sets by
        name, or None."""
        return None

    def data_summary(self) -> str:
        """Returns a line about the training data, for the report at step 1. By default it is empty."""
        return ""

    def data_digests(self) -> Mapping[str, Mapping[str, str]]:
        """Returns for config keys that name files, such as `dataset.train_file`, a digest of what was read from each.

        A run does not resume from a checkpoint that has others. By default there are none, and nothing is compared.
        """
        return {}

    def data_warnings(self) -> Sequence[str]:
        """Returns what looks like a mistake in the data, a line each. `shoal train` and `shoal data` show them."""
        return ()

    def view_data(self, number: int) -> DataView:
        """Returns what `shoal data` shows: the first samples as text, and figures about all. It prepares the data."""
        raise UserError(
            f"recipe {type(self).__name__}: it has no view_data(self, number), so that shoal data cannot show samples; "
            "add it, or use a recipe of text"
        )

    def collate(self, samples: list[Any]) -> Any:
        """Returns a batch of samples."""
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError) as error:
            kind = type(samples[0]).__name__
            raise UserError(
                f"recipe {type(self).__name__}: samples of type {kind} cannot be batched ({one_line(error)}); let the "
                "data return dicts of tensors of one shape, or override collate(self, samples)"
            ) from error

    def example_batch(self, size: int) -> Any:
        """Returns a batch of the first samples of `train_data`, for planning."""
        loader = Loader(self.train_data(), self.collate, BatchSchedule.constant(size, size), seed=0, shuffle=False)
        if (step := next(iter(loader), None)) is None:
            raise UserError(f"recipe {type(self).__name__}: train_data has no samples")
        return step[0].data

    def prepare_batch(self, batch: Any, rng: SampleRng) -> Any:
        """Returns the batch with noise or augmentation. Runs on the device, before the forward.

        Draw random numbers from `rng` only: it gives a sample the same numbers in every layout.
        """
        return batch

    @required
    def inputs(self, batch: Any) -> dict[str, Any]:
        """Returns the keyword arguments of the model for a batch."""
        raise UserError(f"recipe {type(self).__name__} needs inputs(self, batch) -> dict")

    def count(self, batch: Any) -> Tensor | int:
        """Returns the number of terms in the loss: of labels that are not -100, or of samples if there are no labels.

        Labels that are floating-point numbers, such as probabilities of (batch, classes), count as one per sample.
        """
        if isinstance(batch, dict) and isinstance(labels := batch.get("labels"), Tensor):
            return len(labels) if labels.is_floating_point() and labels.ndim else (labels != IGNORED_LABEL).sum()
        return num_samples(batch)

    def labels(self, batch: Any) -> Tensor:
        """Returns the labels of the tokens that the head predicts.

        `training.loss_chunks` and a head that is split over ranks need them.
        """
        if isinstance(batch, dict) and isinstance(labels := batch.get("labels"), Tensor):
            return labels
        raise UserError(
            f"recipe {type(self).__name__}: a batch has no tensor `labels`, which training.loss_chunks and a head "
            "split by tensor parallelism need; add it, or override labels(self, batch) -> Tensor"
        )

    def sequence_length(self, batch: Any) -> int:
        """Returns the number of tokens in each sequence of a batch."""
        if isinstance(batch, dict) and isinstance(tokens := batch.get("input_ids"), Tensor) and tokens.ndim > 1:
            return tokens.shape[1]
        raise UserError(
            f"recipe {type(self).__name__}: a batch has no tensor `input_ids` of (batch, time); add it, or override "
            "sequence_length(self, batch) -> int"
        )

    @required
    def loss(self, output: Any, batch: Any) -> Any:
        """Returns the SUM of the losses of a batch; shoal divides it by the count of the global batch.

        It may return `(loss, metrics)`, with metrics as the method `metrics` returns them.
        """
        raise UserError(f"recipe {type(self).__name__} needs loss(self, output, batch) -> Tensor")

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Any]:
        """Returns numbers to log by name: `(sum, count)`, a tensor that is a mean over the batch's `count`, or a
        torchmetrics object in an attribute of the recipe.

        It is called without gradients, in training and in evaluation.
        """
        return {}

    def objectives(self) -> Mapping[str, Sequence[str]]:
        """Returns objectives that are taken in turn within each step, in this order: the name of each, with the names
        of the parameters that it trains or of the modules that have them. By default there is one, `loss`.
        """
        return {}

    def objective_loss(self, name: str, model: nn.Module, batch: Any) -> Tensor:
        """Returns the SUM of the losses of a batch for one of the `objectives`, as `loss` does.

        It calls the model and its modules as it likes. Only the parameters of this objective get a gradient.
        """
        raise UserError(f"recipe {type(self).__name__} needs objective_loss(self, name, model, batch) -> Tensor")

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameter groups of the optimizer. By default norms, biases and embeddings have no weight
        decay."""
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        trainable = [p for p in model.parameters() if p.requires_grad]
        decayed = [p for p in trainable if p.ndim >= 2 and id(p) not in embeddings]
        flat = [p for p in trainable if p.ndim < 2 or id(p) in embeddings]
        # Also if one is empty: every stage of a pipeline must have as many groups as the whole model.
        return [{"params": decayed}, {"params": flat, "weight_decay": 0.0}]

    def build_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer | None:
        """Returns an optimizer of these parameter groups, or None for the one that the config names.

        The groups are those of `param_groups`, with the config's `lr` and `weight_decay` where they have none. It is
        called again with small tensors in the groups, to find out what the optimizer keeps for a parameter.
        """
        return None

    def schedule(self, step: int, total: int) -> float | None:
        """Returns the factor on the learning rate at a step, counted from 0, or None for the config's schedule."""
        return None

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Returns how the model can be split. By default the longest list of modules of one class are the blocks."""
        return ParallelPlan.derive(model)

    def split_sequence(self, batch: Any, index: int, parts: int) -> Any:
        """Returns the batch with the `index`-th of `parts` equal parts of every sequence, and the positions of its
        tokens.

        Context parallelism needs it. Sequence parallelism calls it with one part, for the positions.
        """
        raise UserError(
            f"recipe {type(self).__name__} has no split_sequence(self, batch, index, parts), which distributed.mesh.cp "
            "and distributed.tensor.sequence_parallel need; add it, or use another layout"
        )

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Raises a UserError if the model does not fit a mesh of these sizes. The model is not built yet."""

    def num_blocks(self) -> int | None:
        """Returns the number of blocks, or None if it is not known before the model is built.

        A pipeline needs at least one block for each stage.
        """
        return None

    def preview(self, model: nn.Module) -> str | None:
        """Returns a text to show after an evaluation, such as a generated one, or None. Runs on every rank."""
        return None

    def preview_texts(self, model: nn.Module, index: int, parts: int) -> Sequence[str]:
        """Returns every `parts`-th of several texts to show, from number `index` on: data-parallel ranks share them.

        All ranks of a sharded model have to call the model equally often, also one that has no text to make.
        """
        return ()


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the cross-entropy over all labels that are not -100, in fp32.

    Logits are (..., vocab), labels (...). Labels are the tokens to predict; nothing is shifted. A recipe with this loss
    can name its `head` in the plan. With `training.loss_chunks` the head computes the sum itself and returns it in
    place of the logits; this function then returns it unchanged.
    """
    if logits.ndim == 0:
        return logits
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def num_samples(batch: Any) -> int:
    """Returns the size of the first dimension of the first tensor in a batch."""
    if isinstance(batch, Tensor):
        return batch.shape[0]
    for value in batch.values() if isinstance(batch, dict) else batch:
        if isinstance(value, Tensor | dict | list | tuple):
            return num_samples(value)
    raise TypeError(f"a batch of type {type(batch).__name__} has no tensor to count samples by; override Recipe.count")
