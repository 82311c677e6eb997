"""Small things"""

# processes: 1

import random

import torch
from torch.utils.data import DataLoader, Dataset

from shoal import CheckpointManager, GradientCompressor, SingleGPUStrategy
from shoal.distributed import seed_everything


class Noise(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor([random.random(), torch.rand(()).item()])


#: One process, on its GPU if there is one: `SingleStrategy` by another name.
strategy = SingleGPUStrategy()

assert (strategy.name, strategy.world_size) == ("single", 1)

#: Python, NumPy and torch, and the workers of a DataLoader, whose seeds torch makes from this one.
seed_everything(42, workers=True)

first = torch.cat([*DataLoader(Noise(), num_workers=1)])
assert len(first.unique()) == 4
seed_everything(42, workers=True)
assert torch.equal(torch.cat([*DataLoader(Noise(), num_workers=1)]), first)

#: Any nested dict of tensors, numbers and text, as for `torch.save`, in safetensors and JSON. Rank 0 writes.
model, manager = torch.nn.Linear(2, 1), CheckpointManager("out")
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
manager.save_checkpoint(state={"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, step=10)

#: And back, the latest or that of a path.
state = manager.load_checkpoint()

assert state["epoch"] == 3
torch.testing.assert_close(state["model"], dict(model.state_dict()))
saved = optimizer.state_dict()
assert state["optimizer"]["param_groups"] == saved["param_groups"]
torch.testing.assert_close(state["optimizer"]["state"], saved["state"])
optimizer.load_state_dict(state["optimizer"])

#: The largest elements of a tensor, with their places.
compressor = GradientCompressor(compression_ratio=0.01)
t = torch.randn(20, 20, dtype=torch.bfloat16)
compressed = compressor.compress(t)

assert compressed.keys() == {"values", "indices", "shape"}
assert len(compressed["values"]) == 4

#: A dense tensor again, on the same device and of the same type.
dense = compressor.decompress(compressed)

assert (dense.shape, dense.dtype, dense.count_nonzero()) == (t.shape, t.dtype, 4)
