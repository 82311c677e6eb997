"""Processes and models"""

# processes: 2

import os

import torch
import torch.distributed as dist
from familiar.models import Block, Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.distributed import cleanup_distributed, setup_distributed, wrap_model_ddp, wrap_model_fsdp

number = int(os.environ["RANK"])


#: Joins the processes that torchrun has started, or stays alone. It takes the options of `DDPStrategy`.
rank, world_size, local_rank = setup_distributed()

assert (rank, world_size, local_rank) == (number, 2, number)
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2

#: In DistributedDataParallel; `device` is this rank's, and may be left out.
model = wrap_model_ddp(nn.Linear(8, 1), torch.device("cpu"))

assert isinstance(model, DistributedDataParallel)

#: Sharded by fully_shard: the blocks, or what `auto_wrap_policy` chooses, in the same words as `FSDPStrategy`.
model = wrap_model_fsdp(Net(), auto_wrap_policy=None)

assert model.head.weight.to_local().shape[0] == (1 if rank == 0 else 0)
assert [type(module).__name__ for module in wrap_model_fsdp(Net(), {Block}).modules()].count("FSDPBlock") == 2

#: Leaves the process group.
cleanup_distributed()

assert not dist.is_initialized()
launched = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}

#: In processes that a script numbers itself, as under `torch.multiprocessing.spawn`. They meet at `MASTER_ADDR` and
#: `MASTER_PORT`, or at port 29500 of this machine.
setup_distributed(rank, world_size)

assert (dist.get_rank(), dist.get_world_size()) == (number, 2)
cleanup_distributed()
os.environ |= launched
