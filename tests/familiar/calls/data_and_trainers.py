"""Data and trainers"""

# processes: 2

import os

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from shoal.distributed import (
    DistributedSampler,
    DistributedTrainer,
    FSDPTrainer,
    cleanup_distributed,
    setup_distributed,
    train_ddp,
)

rank, world_size = int(os.environ["RANK"]), 2
torch.manual_seed(0)
x = torch.randn(10, 4)
dataset = TensorDataset(x, x.sum(1, keepdim=True))


class WithLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs, targets):
        return {"loss": mse_loss(self.layer(inputs), targets)}


#: The numbers of this rank's samples in an epoch; also the `sampler` of a DataLoader. The order is shoal's own.
indices = DistributedSampler(10, 2, rank, world_size).get_indices()

both = [DistributedSampler(10, 2, number, world_size).get_indices() for number in (0, 1)]
assert indices == both[rank]
assert sorted(both[0] + both[1]) == [*range(10)]
assert len(indices) == len(DistributedSampler(10, 2, rank, world_size)) == 5

#: Replicas; the model returns its loss, or `loss_fn=` computes it from (output, targets). Returns the mean over ranks.
setup_distributed(rank, world_size)
torch.manual_seed(rank)
model = WithLoss()
dataloader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(10, 2, rank, world_size))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = DistributedTrainer(model, rank, world_size).train_epoch(dataloader, optimizer)

torch.manual_seed(0)
alone = WithLoss()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
losses = []
for start in (0, 2, 4):
    parts = [x[indices[start : start + 2]] for indices in both]
    loss_alone = torch.stack([mse_loss(alone.layer(part), part.sum(1, keepdim=True)) for part in parts])
    losses += loss_alone.tolist()
    loss_alone.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert abs(loss - sum(losses) / 6) < 1e-6
torch.testing.assert_close(model.layer.weight, alone.layer.weight)

#: The same, sharded by fully_shard. Build the optimizer from `trainer.model`.
torch.manual_seed(0)
trainer = FSDPTrainer(nn.Linear(4, 1), rank, world_size, loss_fn=mse_loss)
optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
loss = trainer.train_epoch(dataloader, optimizer)

assert abs(loss - sum(losses) / 6) < 1e-6
trainer = FSDPTrainer(nn.Linear(4, 1), rank, world_size, loss_fn=mse_loss)
optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
trainer.train_epoch(dataloader, optimizer)
trainer.save_checkpoint("trainer")
second = trainer.train_epoch(dataloader, optimizer)
resumed = FSDPTrainer(nn.Linear(4, 1), rank, world_size, loss_fn=mse_loss)
assert resumed.load_checkpoint("trainer") == {"epoch": 1}
optimizer = torch.optim.SGD(resumed.model.parameters(), lr=0.1, momentum=0.9)
assert resumed.train_epoch(dataloader, optimizer) == second, "the momentum was not loaded"
cleanup_distributed()

#: What `torch.multiprocessing.spawn(train_ddp, args=(world_size, model, dataset), nprocs=world_size)` calls.
losses = train_ddp(rank, world_size, model, dataset, batch_size=2, num_epochs=2, checkpoint="trained")

assert losses[1] < losses[0]
