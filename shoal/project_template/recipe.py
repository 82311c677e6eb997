"""Two spirals: a small network learns on which of them a point in the plane lies."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from shoal.recipes import Recipe


class Points(torch.utils.data.Dataset):
    """Points near two spirals. Any dataset whose samples are dicts of tensors works the same way."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(size) % 2
        radius = torch.rand(size, generator=generator).sqrt()
        angle = 3 * math.pi * radius + math.pi * self.labels
        noise = 0.02 * torch.randn(size, 2, generator=generator)
        self.points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1) + noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"points": self.points[i], "labels": self.labels[i]}


class Spirals(Recipe):
    def build_model(self):  # plain PyTorch for one device; shoal moves, wraps or shards it
        return nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def train_data(self):
        return Points(2000, seed=1)

    def eval_data(self):
        return Points(500, seed=2)

    def inputs(self, batch):  # the keyword arguments of the model's forward
        return {"input": batch["points"]}

    def loss(self, output, batch):  # the sum, not the mean: shoal divides by the labels in the whole global batch
        return F.cross_entropy(output, batch["labels"], reduction="sum")

    def preview(self, model):  # a text that is logged with every evaluation, and printed at the end; may be left out
        data = self.eval_data()
        output = model(data.points.to(next(model.parameters()).device))
        return f"{(output.argmax(1).cpu() == data.labels).float().mean():.1%} of the points for evaluation are right"
