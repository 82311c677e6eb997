"""Tensor parallelism"""

# processes: 2

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shoal import UserError
from shoal.distributed import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelAttention,
    ThreeDParallelism,
    apply_tensor_parallelism,
)
from shoal.processes.world import World
from shoal.strategies import Loop, MeshStrategy, SingleStrategy

strategy = MeshStrategy(mesh={"tp": 2}, device="cpu")
strategy.setup()
world_size = 2
torch.manual_seed(0)


#: The third argument is the number of ranks that share the layer, checked against the mesh; it may be left out. The
#: rest is by keyword: `bias=False`.
up = ColumnParallelLinear(8, 32, world_size)

assert up.bias is not None

#: The layer after it, split by its inputs.
down = RowParallelLinear(32, 8, world_size)

#: Attention of which every rank computes some heads; `num_kv_heads` and `bias` by keyword.
attention = TensorParallelAttention(8, 4, world_size)

model = nn.Sequential(attention, up, nn.Tanh(), down)
x = torch.randn(3, 5, 8)
whole = model(x)
with pytest.raises(UserError, match=r"0: ColumnParallelLinear\(world_size=2\), but the mesh has tp = 1"):
    Loop(SingleStrategy(device="cpu", world=World())).wrap(nn.Sequential(ColumnParallelLinear(8, 32, world_size)))

#: Splits the layers of a model over the ranks of a group, in place.
tp_group = dist.group.WORLD
model = apply_tensor_parallelism(model, tp_group)

assert isinstance(up.weight, DTensor)
assert up.weight.to_local().shape == (16, 8)
torch.testing.assert_close(model(x), whole)
weight = up.weight.full_tensor()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(x).square().mean().backward()
optimizer.step()
assert not torch.equal(up.weight.full_tensor(), weight)

#: A model over a mesh by its three sizes, whose product is the number of processes. Layers that are not split by tensor
#: parallelism are whole on every rank.
model = nn.Sequential(ColumnParallelLinear(8, 32), nn.Tanh(), RowParallelLinear(32, 8))
parallel = ThreeDParallelism(
    model, data_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=2, device="cpu"
)

#: The sizes and the groups.
sizes = parallel.dp_size, parallel.pp_size, parallel.tp_size
groups = parallel.dp_group, parallel.pp_group, parallel.tp_group

assert sizes == (1, 1, 2)
assert [dist.get_world_size(group) for group in groups] == [1, 1, 2]
optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.1)
y = torch.zeros(4, 8)
losses = []
for _ in range(2):
    losses.append(parallel.forward_backward(x[0, :4], y, nn.functional.mse_loss, num_microbatches=2).item())
    assert parallel.step(optimizer, max_norm=1.0).grad_norm > 0
assert losses[1] < losses[0]
assert parallel(x[0, :4]).shape == (4, 8)

#: The same as functions of the groups, one at a time.
apply_tp, apply_pp = ThreeDParallelism.apply_tensor_parallelism, ThreeDParallelism.apply_pipeline_parallelism

piped = apply_pp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), dist.group.WORLD)
assert piped(x[0], num_microbatches=2).shape == (5, 8)
assert apply_tp(nn.Sequential(ColumnParallelLinear(8, 8)), parallel.dp_group)[0].weight.shape == (8, 8)
strategy.teardown()
