"""Trainers by the usual names, over `Loop`: a model, a DataLoader and an optimizer, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from shoal.errors import UserError
from shoal.familiar.functions import (
    cleanup_distributed,
    get_loop,
    get_rank,
    get_world_size,
    is_set_up,
    setup_distributed,
    wrap_model_ddp,
    wrap_model_fsdp,
)
from shoal.familiar.sampler import DistributedSampler
from shoal.strategies.saving import load

Loss = Callable[[Any, Any], Tensor]


class DistributedTrainer:
    """Trains a model in replicas, by DistributedDataParallel.

    The model returns its loss, or an output that has `loss`, as those of transformers do; or `loss_fn(output, targets)`
    computes it, and batches are pairs (inputs, targets). Build the optimizer from `trainer.model`.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        loss_fn: Loss | None = None,
        max_grad_norm: float | None = None,
        **options: Any,
    ):
        """Joins the other processes, unless setup_distributed has done so. `options` are those of the strategy."""
        if not is_set_up():
            device = {"device": options["device"]} if "device" in options else {}
            setup_distributed(rank, world_size, **device)
        self.rank, self.world_size = get_rank(), get_world_size()
        if (self.rank, self.world_size) != (
            self.rank if rank is None else rank,
            self.world_size if world_size is None else world_size,
        ):
            raise UserError(
                f"rank = {rank}, world_size = {world_size}: this process is rank {self.rank} of {self.world_size}; "
                "leave both out, or make them agree"
            )
        self.model = self._wrap(model, **options)
        """The module to call; the plain model is `trainer.loop.model`."""
        self.loop, self.loss_fn, self.max_grad_norm, self.epoch = get_loop(self.model), loss_fn, max_grad_norm, 0
        self._optimizer: Optimizer | None = None
        self._without_optimizer: str | Path | None = None
        """The checkpoint that was loaded before there was an optimizer."""

    def _wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        return wrap_model_ddp(model, **options)

    def train_epoch(self, dataloader: Iterable[Any], optimizer: Optimizer) -> float:
        """Trains one epoch and returns the mean loss over its batches and over all ranks."""
        self._take(optimizer)
        loop, losses = self.loop, torch.zeros(2, device=self.loop.strategy.device)  # their sum and their number
        batch_sampler = getattr(dataloader, "batch_sampler", None)
        samplers: list[Any] = [getattr(dataloader, "sampler", None), batch_sampler]
        samplers.append(getattr(batch_sampler, "sampler", None))
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        for batch in dataloader:
            with loop.autocast():
                loss = self._loss(loop.to_device(batch))
            loop.backward(loss)
            loop.step(optimizer, self.max_grad_norm)
            losses += torch.stack([loss.detach().float(), torch.ones_like(losses[0])])
        self.epoch += 1
        total, number = loop.reduce(losses, "sum").tolist()
        if not number:
            raise UserError("train_epoch: the dataloader has no batches; check the dataset and drop_last")
        return float(total / number)

    def save_checkpoint(self, path: str | Path, **state: Any) -> None:
        """Writes model, optimizer and epoch as the folder `path`, as `Loop.save` does."""
        self.loop.save(path, **{"epoch": self.epoch, **state})

    def load_checkpoint(self, path: str | Path, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Loads what `save_checkpoint` wrote, and returns its state.

        The state of an optimizer that this trainer has not seen yet is loaded when `train_epoch` gets it.
        """
        if optimizer is not None:
            self._take(optimizer)
        self._without_optimizer = path if self._optimizer is None else None
        state = self.loop.strategy.load_checkpoint(path, self.loop.model, self._optimizer)
        self.epoch = int(state.get("epoch", self.epoch))
        return state

    def _take(self, optimizer: Optimizer) -> None:
        """Lets an optimizer join the loop, with its state of a checkpoint that was loaded before."""
        self.loop.add(optimizer)
        self._optimizer = optimizer
        if self._without_optimizer is not None:
            path, self._without_optimizer = self._without_optimizer, None
            # Not the weights, which may have been changed since they were loaded.
            load(self.loop.strategy, Path(path), self.loop.model, [optimizer], with_weights=False)

    def _loss(self, batch: Any) -> Tensor:
        if self.loss_fn is not None:
            inputs, targets = batch
            loss: Any = self.loss_fn(self._call(inputs), targets)
        else:
            output = self._call(batch)
            loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
            loss = getattr(loss, "loss", loss)
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = f"a tensor of shape {[*loss.shape]}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(
                f"{type(self).__name__}: the model returns {kind} and no loss; give loss_fn=function, such as "
                "torch.nn.functional.cross_entropy, which is called with (output, targets)"
            )
        return loss

    def _call(self, inputs: Any) -> Any:
        """Calls the model with what a DataLoader gives: keywords, several arguments, or one."""
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, list | tuple) else self.model(inputs)


class FSDPTrainer(DistributedTrainer):
    """As DistributedTrainer, with the model sharded by fully_shard; `options` are those of FSDPStrategy."""

    def _wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        return wrap_model_fsdp(model, **options)


def train_ddp(
    rank: int,
    world_size: int,
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    num_epochs: int = 1,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    loss_fn: Loss | None = None,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> list[float]:
    """Trains a copy of a model by DDP and AdamW as one of `world_size` processes; returns the mean loss of each epoch.

    It is what `torch.multiprocessing.spawn(train_ddp, args=(world_size, model, dataset), nprocs=world_size)` calls.
    `batch_size` is that of one process. The trained model is saved as the folder `checkpoint`, if one is given.
    """
    setup_distributed(rank, world_size, **options)
    try:
        # A copy: torch's spawn gives all processes one model in shared memory, and each of them would step it.
        trainer = DistributedTrainer(deepcopy(model), rank, world_size, loss_fn=loss_fn)
        size = len(dataset)  # type: ignore[arg-type]  # a map-style dataset has one
        sampler = DistributedSampler(size, batch_size, rank, world_size)
        loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=learning_rate)
        losses = [trainer.train_epoch(loader, optimizer) for _ in range(num_epochs)]
        if checkpoint is not None:
            trainer.save_checkpoint(checkpoint)
        return losses
    finally:
        cleanup_distributed()
