"""Trainers by their usual names, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from shoal.distributed import DistributedSampler, DistributedTrainer, cleanup_distributed

DATA = TensorDataset(torch.ones(8, 4), torch.ones(8, 1))


@pytest.fixture
def trainer() -> Iterator[DistributedTrainer]:
    yield DistributedTrainer(nn.Linear(4, 1), loss_fn=mse_loss, device="cpu")
    cleanup_distributed()


def sgd(trainer: DistributedTrainer, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainer.model.parameters(), lr=lr, momentum=0.9)


def test_a_sampler_inside_a_batch_sampler_learns_the_epoch(trainer: DistributedTrainer) -> None:
    sampler = DistributedSampler(8, 2, 0, 1)
    loader, optimizer = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False)), sgd(trainer, 0.1)
    for epoch in range(2):
        trainer.train_epoch(loader, optimizer)
        assert sampler.epoch == epoch


def test_weights_changed_after_a_load_stay_changed(trainer: DistributedTrainer, tmp_path: Path) -> None:
    optimizer = sgd(trainer, 0.1)
    trainer.train_epoch(DataLoader(DATA, batch_size=2), optimizer)
    trainer.save_checkpoint(tmp_path / "saved")
    momentum = optimizer.state[trainer.loop.model.weight]["momentum_buffer"].clone()
    resumed = DistributedTrainer(nn.Linear(4, 1), loss_fn=mse_loss, device="cpu")
    resumed.load_checkpoint(tmp_path / "saved")
    torch.testing.assert_close(resumed.loop.model.weight, trainer.loop.model.weight)
    nn.init.zeros_(resumed.loop.model.weight)
    late = sgd(resumed, 0.1)
    resumed._take(late)
    assert not resumed.loop.model.weight.any()
    torch.testing.assert_close(late.state[resumed.loop.model.weight]["momentum_buffer"], momentum)
