"""A small GAN: two objectives, taken in turn in every step. Its data are eight Gaussians on a ring.

    shoal train examples/gan/run.yaml
    shoal train examples/gan/run.yaml launch.procs_per_node=2 distributed.strategy=fsdp
    shoal verify examples/gan/run.yaml

`generator` and `discriminator` each have their parameters, their loss and their optimizer.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import softplus

from shoal.recipes import Recipe

NOISE = 4


def centres():
    angles = 2 * math.pi * torch.arange(8) / 8
    return torch.stack([angles.cos(), angles.sin()], 1)


class Ring(torch.utils.data.Dataset):
    """Points around eight centres on the unit circle."""

    def __init__(self, size):
        noise = torch.randn(size, 2, generator=torch.Generator().manual_seed(0))
        self.points = centres()[torch.arange(size) % 8] + 0.05 * noise

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"x": self.points[index]}


def mlp(inputs, outputs, hidden=64):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = mlp(NOISE, 2), mlp(2, 1)

    def forward(self, noise):
        return self.generator(noise)


class RingGan(Recipe):
    def build_model(self):
        return Gan()

    def train_data(self):
        return Ring(4096)

    def eval_data(self):
        return Ring(64)

    def prepare_batch(self, batch, rng):
        # A sample has the same noise in every layout, and each objective its own.
        return {**batch, "noise": {name: rng.normal(NOISE) for name in self.objectives()}}

    def objectives(self):
        return {"discriminator": ["discriminator"], "generator": ["generator"]}

    def objective_loss(self, name, model, batch):
        noise = batch["noise"][name]
        if name == "generator":
            return softplus(-model.discriminator(model(noise))).sum()
        with torch.no_grad():
            fake = model(noise)
        return softplus(-model.discriminator(batch["x"])).sum() + softplus(model.discriminator(fake)).sum()

    def count(self, batch):
        return len(batch["x"])

    def preview(self, model):
        """Says how many of the eight centres samples come near to."""
        points = model(torch.randn(1000, NOISE)).cpu()
        near = (points[:, None] - centres()).norm(dim=-1) < 0.25
        return f"{int((near.sum(0) > 20).sum())} of 8 centres, {near.any(1).float().mean():.0%} of samples near one"
