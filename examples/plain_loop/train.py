"""Train a classifier with a loop of your own, and lose nothing of what a run has.

    python examples/plain_loop/train.py                                        # one process
    torchrun --nproc_per_node=2 examples/plain_loop/train.py                   # two, each with half of a batch
    python examples/plain_loop/train.py training.max_steps=400                 # goes on where it stopped
    python examples/plain_loop/train.py distributed.strategy=fsdp experiment.output_dir=runs/shards

The recipe has the model and the data. What a step computes is in `main`: a cross-entropy, and a penalty on answers that
are too sure of themselves. Around it are the logs, evaluations and checkpoints of any run; Ctrl-C saves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import pi
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

SETTINGS: dict[str, Any] = {
    "experiment": {"name": "spirals"},
    "training": {"max_steps": 200, "global_batch_size": 64, "learning_rate": 1e-2, "eval_steps": 100},
    "logging": {"every": 20},
}


def spirals(size: int, seed: int) -> TensorDataset:
    """Returns points on two spirals, and which of the two each is on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(size) % 2
    radius = torch.rand(size, generator=generator)
    angle = 2 * pi * radius + pi * label
    points = 4 * radius[:, None] * torch.stack((angle.cos(), angle.sin()), dim=1)
    return TensorDataset(points + 0.05 * torch.randn(size, 2, generator=generator), label)


class Spirals(shoal.Recipe):
    """Model and data. The loop is below, so that there is no `loss`."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def train_data(self) -> TensorDataset:
        return spirals(4096, seed=0)

    def eval_data(self) -> TensorDataset:
        return spirals(512, seed=1)


def evaluate(run: shoal.Run, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Returns means over a batch; the run averages them over all of the evaluation data."""
    points, labels = batch
    logits = run.model(points)
    return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(-1) == labels).float().mean()}


def main(arguments: Sequence[str]) -> None:
    settings = {key: yaml.safe_load(value) for key, value in (argument.split("=", 1) for argument in arguments)}
    with shoal.Run(SETTINGS, recipe=Spirals(), **settings) as run:
        run.evaluation = evaluate
        for step in run.steps():
            for points, labels in step.batches:  # this rank's micro-batches, on its device
                with step.accumulate(), run.autocast():
                    logits = run.model(points)
                    penalty = logits.square().mean()
                    loss = F.cross_entropy(logits, labels) + 1e-3 * penalty
                    run.backward(loss)
                step.log(penalty=penalty)
            run.step(max_norm=1.0)
    if run.is_main_process and run.outcome is not None:
        print(f"step {run.outcome.step}, accuracy {run.outcome.metrics['eval/accuracy']:.3f}")
        print(f"saved in {run.outcome.last_checkpoint}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except shoal.UserError as error:
        sys.exit(f"error: {error}")
