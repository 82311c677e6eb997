"""A small CNN that tells drawn shapes apart: `shoal train examples/classifier/run.yaml`."""

import torch
from torch import Tensor, nn

from shoal.recipes import Recipe

SIZE = 16
NAMES = ("square", "circle", "triangle", "cross")


class Shapes:
    """Pictures of shapes at random places, in random sizes, with noise."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * self.size + index)
        label = index % len(NAMES)
        x, y, r = torch.rand(3, generator=generator) * torch.tensor([5, 5, 2]) + torch.tensor([5, 5, 2])
        rows, columns = torch.meshgrid(torch.arange(SIZE) - y, torch.arange(SIZE) - x, indexing="ij")
        shape = (
            (rows.abs() < r) & (columns.abs() < r),
            rows**2 + columns**2 < r**2,
            (rows < r) & (columns.abs() < (rows + r) / 2),
            ((rows.abs() < 1) | (columns.abs() < 1)) & (rows.abs() < r) & (columns.abs() < r),
        )[label]
        noise = torch.randn(SIZE, SIZE, generator=generator)
        return {"image": (shape.float() + 0.3 * noise)[None], "labels": torch.tensor(label)}


def layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


class Classifier(Recipe):
    def build_model(self):
        return nn.Sequential(layer(1, 16), layer(16, 32), nn.Flatten(), nn.Linear(32 * 16, len(NAMES)))

    def train_data(self):
        return Shapes(2000, seed=0)

    def eval_data(self):
        return Shapes(400, seed=1)

    def inputs(self, batch):
        return {"input": batch["image"]}

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch["labels"], reduction="sum")

    def metrics(self, output, batch):
        return {"accuracy": ((output.argmax(-1) == batch["labels"]).sum(), len(output))}
